# SPDX-License-Identifier: Apache-2.0
"""Build the fork's wheel: repack a hash-checked upstream wheel with the delta applied in memory.

A lane without such a wheel starts from the sdist: `build_lane` has `empty_target.py` make the wheel first.

Every unchanged member is copied packed as it is; RECORD's hashes are computed from the bytes, not taken
over. `metadata.py` says what the result is called and needs, `archive.py` writes it.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.cache import CacheError
from tools.fork import metadata
from tools.fork.archive import ArchiveWriter
from tools.fork.delta import PACKAGE, REPO, load_edits, new_modules, npu_sources, package_files, package_version
from tools.fork.empty_target import make_empty_wheel
from tools.fork.errors import ArtefactError, ForkError
from tools.fork.lanes import Lane, read_toml
from tools.fork.patch import patch_tree
from tools.fork.source import WheelTree
from tools.native import elf
from tools.native.building import PLACE, REQUIRED
from tools.native.toolchain import GLIBC

_LICENSES = ("LICENSE", "NOTICE")


def build_lane(lane: Lane, artefact: Path, machine: str, out: Path, libraries: Mapping[str, bytes]) -> Path:
    """The fork's wheel of a lane for one machine, from upstream's wheel or sdist (hash already checked)."""
    if artefact.suffix == ".whl":
        return build_wheel(lane, artefact, out, libraries)
    with tempfile.TemporaryDirectory(prefix="vllm-pd-empty-") as folder:
        upstream = make_empty_wheel(artefact, lane.release, machine, Path(folder))
        return build_wheel(lane, upstream, out, libraries)


def build_wheel(lane: Lane, artefact: Path, out: Path, libraries: Mapping[str, bytes], repo: Path = REPO) -> Path:
    """Write the fork's wheel for `lane` into folder `out` and return its path.

    Args:
        lane: what to build.
        artefact: upstream's wheel, its hash already checked; of an sdist, what `empty_target.py` made of it.
        out: created where missing; an older wheel of the same name is replaced in one step.
        libraries: what `tools.native` built for the artefact's machine, by name.
        repo: where the delta is.

    Raises:
        AnchorLost: an edit does not apply.
        ForkError: a new module of ours exists upstream already, or the libraries do not keep what the tag promises.
    """
    distribution, release, tag = metadata.split_wheel_name(artefact.name)
    check_libraries(libraries, tag)
    if release != lane.release:
        raise ForkError(f"lane {lane.name!r}: release is {lane.release}, its artefact holds {release}")
    version = metadata.fork_version(release, package_version(repo), lane.name)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"vllm-{version}-{tag}.whl"
    handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=out)
    os.close(handle)
    try:
        build = _Build(lane, artefact, repo, old=f"{distribution}-{release}", new=f"vllm-{version}")
        build.add_libraries(libraries)
        build.write(Path(aside), version, tag)
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    finally:
        Path(aside).unlink(missing_ok=True)
    return target


def check_libraries(libraries: Mapping[str, bytes], tag: str) -> None:
    """Every wheel holds the host library, and loads on all that its tag names.

    Raises:
        ForkError: it is missing, is for another machine, or needs a newer glibc than the tag says.
    """
    if REQUIRED not in libraries:
        raise ForkError(f"the wheel would lack {PLACE}/{REQUIRED}: run `python -m tools.native build`")
    machine, glibc = metadata.glibc_of_tag(tag)
    for name, data in libraries.items():
        try:
            elf.check_library(name, data, machine, glibc or GLIBC)
        except CacheError as error:
            raise ForkError(f"tag {tag}: {error}") from None


class _Build:
    """One run: reads upstream's wheel once, writes members in order, collects RECORD."""

    def __init__(self, lane: Lane, artefact: Path, repo: Path, *, old: str, new: str) -> None:
        self.lane, self.repo = lane, repo
        self.old, self.new = old, new
        self.source = zipfile.ZipFile(artefact)
        tree = WheelTree(artefact, lane.release)
        self.edited = patch_tree(tree, load_edits(repo)).files
        self.added = {**new_modules(repo), **package_files(repo), **(npu_sources(repo) if lane.npu else {})}
        self.rows: list[tuple[str, str, str]] = []
        taken = sorted(set(self.added) & set(tree.names()))
        if taken:
            raise ForkError(f"vLLM {lane.release} has these new modules of ours already: {', '.join(taken)}")

    def add_libraries(self, libraries: Mapping[str, bytes]) -> None:
        """Ours, at the place where the package looks for them."""
        self.added |= {f"{PLACE}/{name}": data for name, data in libraries.items()}

    def write(self, path: Path, version: str, tag: str) -> None:
        """All members: upstream's in their order, ours, the metadata, RECORD last."""
        info_folder = f"{self.new}.dist-info"
        with self.source, ArchiveWriter(path) as out:
            for info, name in self._members():
                if not name.startswith(f"{info_folder}/"):
                    self._put_upstream(out, info, name)
            for name, data in sorted(self.added.items()):
                self._put(out, name, data)
            self._put_metadata(out, info_folder, version, tag)
            record = f"{info_folder}/RECORD"
            out.add(record, metadata.record_text(self.rows, record).encode())

    def _members(self) -> Iterator[tuple[zipfile.ZipInfo, str]]:
        """Upstream's files with their name in our wheel; no folders, no byte code, no RECORD."""
        for info in self.source.infolist():
            name = info.filename
            if name.endswith(("/", ".pyc", ".dist-info/RECORD", ".dist-info/RECORD.jws")):
                continue
            folder, slash, rest = name.partition("/")
            if folder in (f"{self.old}.dist-info", f"{self.old}.data"):
                name = f"{self.new}{folder[len(self.old) :]}{slash}{rest}"
            yield info, name

    def _put_upstream(self, out: ArchiveWriter, info: zipfile.ZipInfo, name: str) -> None:
        if name in self.edited:
            self._put(out, name, self.edited[name], (info.external_attr >> 16) & 0o777 or 0o644)
            return
        out.copy(self.source, info, name)
        self.rows.append(metadata.record_row(name, self.source.read(info)))

    def _put(self, out: ArchiveWriter, name: str, data: bytes, mode: int = 0o644) -> None:
        out.add(name, data, 0o755 if name.endswith(".so") else mode)
        self.rows.append(metadata.record_row(name, data))

    def _put_metadata(self, out: ArchiveWriter, folder: str, version: str, tag: str) -> None:
        ours = {f"{PACKAGE}/{n}": p.read_bytes() for n in _LICENSES if (p := self.repo / n).is_file()}
        files = {name: self.source.read(i) for i, name in self._members() if name.startswith(f"{folder}/")}
        for needed in ("METADATA", "WHEEL"):
            if f"{folder}/{needed}" not in files:
                raise ArtefactError(f"{self.source.filename}: has no {needed} in its metadata folder")
        for name, data in files.items():
            kind = name[len(folder) + 1 :]
            if kind == "METADATA":
                data = metadata.new_metadata(
                    data.decode(),
                    self.lane,
                    version=version,
                    ours=run_time_requirements(self.repo),
                    licenses=list(ours),
                ).encode()
            elif kind == "WHEEL":
                data = metadata.new_wheel_file(data.decode(), tag).encode()
            elif kind == "top_level.txt":
                data = data.rstrip() + f"\n{PACKAGE}\n".encode()
            self._put(out, name, data)
        for name, data in ours.items():
            self._put(out, f"{folder}/licenses/{name}", data)


def run_time_requirements(repo: Path) -> list[str]:
    """What `vllm_ascend_pd` needs at run time: `[project].dependencies` of pyproject.toml."""
    project = read_toml(repo / "pyproject.toml")["project"]
    return [str(requirement) for requirement in project.get("dependencies", [])]
