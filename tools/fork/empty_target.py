# SPDX-License-Identifier: Apache-2.0
"""From upstream's sdist to the wheel that its own build makes for the target `empty`: Python and data, no kernels.

Nothing of upstream is executed: no setup.py, hence no compiler, no Rust, no torch and no network in the build.
What goes in is what `VLLM_TARGET_DEVICE=empty pip wheel` takes (the sdist's own list of sources, below `vllm/`) and
what it asks for (`requirements/common.txt`, in the words of the sdist's PKG-INFO). `wheel.py` repacks the result.
"""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from pathlib import Path

from tools.fork.errors import ArtefactError
from tools.fork.metadata import project_of, project_of_line, record_row, record_text
from tools.native.toolchain import GLIBC

_SOURCES = "vllm.egg-info/SOURCES.txt"
_COMMON = "requirements/common.txt"
# Upstream's package data lists, besides, headers that a CUDA build downloads; `vllm-rs` is its Rust front end.
_NO_PACKAGE_DATA = ("vllm/vllm-rs",)


def make_empty_wheel(sdist: Path, release: str, machine: str, folder: Path) -> Path:
    """Write upstream's `empty` wheel into `folder`, tagged for the machine whose library the fork adds.

    The tag names a machine though upstream's part is Python alone: the fork's wheel holds `libpd_host.so`, loaded by
    ctypes, so any CPython 3 does (`py3-none`), but the machine and the oldest glibc must be promised.

    Raises:
        ArtefactError: the sdist lacks something that its own build would read, or is of another release.
    """
    files = read_sdist(sdist)
    info = f"vllm-{release}.dist-info"
    tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    needed = (_SOURCES, _COMMON, "PKG-INFO", "LICENSE", "vllm.egg-info/entry_points.txt", "vllm/_version.py")
    if missing := [name for name in needed if name not in files]:
        raise ArtefactError(f"{sdist.name}: has no {', '.join(missing)}")
    if (found := str(email.message_from_bytes(files["PKG-INFO"])["Version"])) != release:
        raise ArtefactError(f"{sdist.name}: its PKG-INFO says version {found}, want {release}")
    members = {name: files[name] for name in package_members(files)}
    members[f"{info}/METADATA"] = empty_metadata(files["PKG-INFO"].decode(), files[_COMMON].decode()).encode()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    members[f"{info}/entry_points.txt"] = files["vllm.egg-info/entry_points.txt"]
    members[f"{info}/licenses/LICENSE"] = files["LICENSE"]
    members[f"{info}/top_level.txt"] = b"vllm\n"
    record = f"{info}/RECORD"
    members[record] = record_text([record_row(n, d) for n, d in members.items()], record).encode()
    path = folder / f"vllm-{release}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100644 << 16
            out.writestr(entry, data)
    return path


def read_sdist(path: Path) -> dict[str, bytes]:
    """The files of an sdist that its build can read, by their path below its one folder."""
    wanted = re.compile(r"(vllm/|vllm\.egg-info/|requirements/common\.txt$|PKG-INFO$|LICENSE$)")
    files = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and wanted.match(name):
                stream = archive.extractfile(member)
                assert stream is not None
                files[name] = stream.read()
    return files


def package_members(files: dict[str, bytes]) -> list[str]:
    """What setuptools puts into the wheel: the listed sources below `vllm/` that lie in a package.

    Raises:
        ArtefactError: the list names a file that is not there.
    """
    listed = sorted({line.strip() for line in files[_SOURCES].decode().splitlines()})
    named = [name for name in listed if name.startswith("vllm/") and name not in _NO_PACKAGE_DATA]
    if absent := [name for name in named if name not in files]:
        raise ArtefactError(f"{_SOURCES} lists files that the sdist lacks: {', '.join(absent[:5])}")
    return named


def empty_metadata(pkg_info: str, common: str) -> str:
    """PKG-INFO with the requirements of the target `empty`: those of `common.txt`, and the extras."""
    wanted = {project_of(line) for line in common.splitlines() if line.strip() and not line.lstrip().startswith("#")}
    head, gap, body = pkg_info.replace("\r\n", "\n").partition("\n\n")
    lines = []
    kept = set()
    for line in head.splitlines():
        project = project_of_line(line)
        if project is None or "extra ==" in line:
            lines.append(line)
        elif project in wanted:
            lines.append(line)
            kept.add(project)
    if missing := sorted(wanted - kept):
        raise ArtefactError(f"{_COMMON} asks for what PKG-INFO does not know: {', '.join(missing)}")
    return "\n".join(lines) + gap + body
