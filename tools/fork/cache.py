# SPDX-License-Identifier: Apache-2.0
"""Upstream artefacts on disk: `<cache>/artefacts/<sha256>/<name>`, and never used without that hash.

`$VLLM_PD_CACHE` moves the cache from `~/.cache/vllm-ascend-pd`. Two processes may fill it at once: each
writes a file of its own and moves it into place. `index.py` fetches.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.fork.errors import ArtefactError
from tools.fork.index import Index, RemoteFile
from tools.fork.lanes import Artefact

_CHUNK_BYTES = 1 << 20


def cache_root() -> Path:
    """The folder that holds everything costly, outside the checkout."""
    return Path(os.environ.get("VLLM_PD_CACHE") or Path.home() / ".cache" / "vllm-ascend-pd")


def cached_path(artefact: Artefact) -> Path:
    """Where the artefact lies once it was fetched."""
    return cache_root() / "artefacts" / artefact.sha256 / artefact.name


def require(artefact: Artefact, index: Index | None) -> Path:
    """The path of an artefact whose bytes were just compared with its hash; fetched where missing.

    Args:
        artefact: what is wanted.
        index: where to fetch from; None means offline.

    Raises:
        ArtefactError: missing and offline, not on the index, or the wrong bytes (both hashes named).
    """
    path = cached_path(artefact)
    if path.is_file():
        found = sha256_of(path)
        if found != artefact.sha256:
            raise ArtefactError(
                f"{path}: is not the pinned artefact: sha256 is {found}, want {artefact.sha256}; "
                f"remove the file and run `python -m tools.fork fetch`"
            )
        return path
    if index is None:
        raise ArtefactError(
            f"{artefact.name} is not in the cache ({path.parent}) and this run is offline; "
            f"run `python -m tools.fork fetch` with a network, or copy the file there"
        )
    remote = index.find(artefact.project, artefact.name)
    if remote.sha256 is not None and remote.sha256 != artefact.sha256:
        raise ArtefactError(
            f"{artefact.name}: {index.url} offers sha256 {remote.sha256}, pinned is {artefact.sha256}; "
            f"nothing was fetched"
        )
    return _store(artefact, remote, index)


def adopt(artefact: Artefact, folder: Path) -> None:
    """Copy an artefact from `folder` into the cache, for machines without an index.

    Raises:
        ArtefactError: the folder does not have it, or not with that hash.
    """
    source = folder / artefact.name
    if not source.is_file():
        raise ArtefactError(f"--from {folder}: has no {artefact.name}")
    if (found := sha256_of(source)) != artefact.sha256:
        raise ArtefactError(f"{source}: sha256 is {found}, pinned is {artefact.sha256}")
    path = cached_path(artefact)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{artefact.name}.", dir=path.parent)
    os.close(handle)
    try:
        shutil.copyfile(source, aside)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)


def _store(artefact: Artefact, remote: RemoteFile, index: Index) -> Path:
    path = cached_path(artefact)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    handle, aside = tempfile.mkstemp(prefix=f".{artefact.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            report = progress(artefact.name, remote.size)
            for chunk in index.download(remote):
                out.write(chunk)
                digest.update(chunk)
                report(len(chunk))
        if digest.hexdigest() != artefact.sha256:
            raise ArtefactError(
                f"{artefact.name}: the downloaded bytes have sha256 {digest.hexdigest()}, "
                f"want {artefact.sha256}; they were thrown away"
            )
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)
    return path


def find_release(projects: Iterable[str], release: str, suffixes: Iterable[str]) -> Artefact | None:
    """An artefact of `release` that an earlier `--release` left in the cache; its folder names its hash."""
    for project in projects:
        stem = f"{project.replace('-', '_')}-{release}"
        for suffix in suffixes:
            for path in sorted((cache_root() / "artefacts").glob(f"*/{stem}*{suffix}")):
                if path.name.startswith((f"{stem}-", f"{stem}.tar")):
                    return Artefact(project, path.name, path.parent.name)
    return None


def sha256_of(path: Path) -> str:
    """The hash of a file, in lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def progress(name: str, size: int | None) -> Callable[[int], None]:
    """A function that takes the number of new bytes and shows how far a download is, on stderr.

    On a terminal one line that is rewritten; elsewhere one line each quarter.
    """
    done, shown = 0, -1
    live = sys.stderr.isatty()

    def report(num_bytes: int) -> None:
        nonlocal done, shown
        done += num_bytes
        percent = 100 * done // size if size else 0
        step = percent if live else percent // 25
        if step == shown and size:
            return
        if not size and not live:
            return
        shown = step
        of = f" of {size / 1e6:.0f} MB ({percent} %)" if size else " MB"
        end = "\n" if not live or done == size else ""
        print(f"{chr(13) if live else ''}fetching {name}: {done / 1e6:.0f}{of}", end=end, file=sys.stderr, flush=True)

    return report
