# SPDX-License-Identifier: Apache-2.0
"""Upstream's tree as a read-only map from path (`vllm/…`) to bytes: from a wheel, an sdist or a folder.

Nothing here writes or unpacks to disk. `patch.py` reads through it, `wheel.py` reads wheels directly.
"""

from __future__ import annotations

import tarfile
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path


class UpstreamTree(ABC):
    """The files of one upstream release; `release` is its version, `label` says where it was read."""

    def __init__(self, release: str, label: str) -> None:
        self.release = release
        self.label = label

    @abstractmethod
    def names(self) -> list[str]:
        """All paths, sorted."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The bytes of `name`, or None where the release has no such file."""


class WheelTree(UpstreamTree):
    """A wheel; the archive stays open for the life of the object."""

    def __init__(self, path: Path, release: str) -> None:
        super().__init__(release, path.name)
        self._zip = zipfile.ZipFile(path)
        self._names = sorted(n for n in self._zip.namelist() if not n.endswith("/"))
        self._known = frozenset(self._names)

    def names(self) -> list[str]:
        """All members but folders, sorted."""
        return list(self._names)

    def read(self, name: str) -> bytes | None:
        """One member, or None."""
        return self._zip.read(name) if name in self._known else None


class SdistTree(UpstreamTree):
    """The `vllm/` folder of an sdist (read into memory at once: a gzip stream has no random access)."""

    def __init__(self, path: Path, release: str) -> None:
        super().__init__(release, path.name)
        self._files: dict[str, bytes] = {}
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                if member.isfile() and name.startswith("vllm/"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    self._files[name] = stream.read()

    def names(self) -> list[str]:
        """All paths below `vllm/`, sorted."""
        return sorted(self._files)

    def read(self, name: str) -> bytes | None:
        """One file, or None."""
        return self._files.get(name)


class FolderTree(UpstreamTree):
    """A folder that holds `vllm/`: site-packages or an unpacked release."""

    def __init__(self, path: Path, release: str) -> None:
        super().__init__(release, str(path))
        self._root = path

    def names(self) -> list[str]:
        """All files below `vllm/`, sorted, without byte code."""
        found = (p for p in (self._root / "vllm").rglob("*") if p.is_file() and p.suffix != ".pyc")
        return sorted(p.relative_to(self._root).as_posix() for p in found)

    def read(self, name: str) -> bytes | None:
        """One file, or None."""
        path = self._root / name
        return path.read_bytes() if path.is_file() else None


class MemoryTree(UpstreamTree):
    """Files given as a dict; the tests' upstream."""

    def __init__(self, files: dict[str, bytes], release: str) -> None:
        super().__init__(release, "memory")
        self._files = dict(files)

    def names(self) -> list[str]:
        """All paths, sorted."""
        return sorted(self._files)

    def read(self, name: str) -> bytes | None:
        """One file, or None."""
        return self._files.get(name)


def open_artefact(path: Path, release: str) -> UpstreamTree:
    """The tree inside a wheel or an sdist, by its name."""
    return WheelTree(path, release) if path.suffix == ".whl" else SdistTree(path, release)
