# SPDX-License-Identifier: Apache-2.0
"""The cache outside the checkout: what costs time or network, each thing under a hash, checked at every use.

`$VLLM_PD_CACHE`, else `~/.cache/vllm-ascend-pd`. Standard library only: the very first step of a fresh
machine runs this. Environments are never kept here, they do not move.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class CacheError(Exception):
    """Something fetched or kept is not what its hash says, or could not be had."""


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel of the package index. `sha256` has one entry per platform build that we accept."""

    name: str
    version: str
    sha256: tuple[str, ...]

    def requirement(self) -> str:
        """A line of a requirements file that pip accepts for these hashes only."""
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in self.sha256)
        return f"{self.name}=={self.version} {hashes}"


def get_cache_root() -> Path:
    """The cache folder; it need not exist yet."""
    configured = os.environ.get("VLLM_PD_CACHE")
    return Path(configured).expanduser().resolve() if configured else Path.home() / ".cache/vllm-ascend-pd"


def compute_sha256(path: Path) -> str:
    """Hex digest of one file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def compute_digest(*parts: str) -> str:
    """Hex digest of strings; their boundaries count."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def iter_source_files(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """Every file under `root/name` in a stable order, without what is built there: bytecode, libraries."""
    for name in names:
        start = root / name
        found = [start] if start.is_file() else sorted(start.rglob("*"))
        yield from (path for path in found if path.is_file() and path.suffix not in {".pyc", ".pyo", ".so"})


def compute_tree_digest(root: Path, names: Iterable[str]) -> str:
    """Hex digest of the paths and contents under `root/name`, for each name."""
    return compute_digest(
        *(f"{path.relative_to(root)}={compute_sha256(path)}" for path in iter_source_files(root, names))
    )


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A temporary folder beside the final place, so that a rename publishes it; removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Rename `staged` to `final`. Whoever came first stays: both have the same key, so the same content."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        staged.rename(final)
    except OSError:
        if not final.exists():
            raise


def fetch_wheels(wheels: Iterable[PinnedWheel], python: str = sys.executable) -> list[Path]:
    """Paths of the wheels in the cache, downloaded with pip where missing; each hash checked now.

    Raises:
        CacheError: pip could not get one, or what it got has another hash.
    """
    return [_find_wheel(wheel) or _download_wheel(wheel, python) for wheel in wheels]


def _find_wheel(wheel: PinnedWheel) -> Path | None:
    for digest in wheel.sha256:
        folder = get_cache_root() / "downloads" / digest
        for path in sorted(folder.glob("*.whl")):
            if compute_sha256(path) == digest:
                return path
            print(f"cache: {path} does not have its hash any more, fetching it again", file=sys.stderr)
            path.unlink()
    return None


def _download_wheel(wheel: PinnedWheel, python: str) -> Path:
    downloads = get_cache_root() / "downloads"
    with staging(downloads) as folder:
        requirements = folder / "requirements.txt"
        requirements.write_text(wheel.requirement() + "\n")
        command = [python, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
        command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        command += ["-d", str(folder), "-r", str(requirements)]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        got = list(folder.glob("*.whl"))
        if done.returncode != 0 or len(got) != 1:
            raise CacheError(
                f"pip could not download {wheel.name}=={wheel.version} with a pinned hash:\n{done.stderr.strip()}"
            )
        digest = compute_sha256(got[0])
        if digest not in wheel.sha256:
            raise CacheError(f"{got[0].name}: sha256 is {digest}, wanted one of {', '.join(wheel.sha256)}")
        target = downloads / digest / got[0].name
        target.parent.mkdir(parents=True, exist_ok=True)
        got[0].replace(target)
    return target
