# SPDX-License-Identifier: Apache-2.0
"""A small package index on disk: wheels that hold metadata alone, made for requirements that are given."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.fork.metadata import record_row, record_text


def write_wheel(index: Path, name: str, version: str, requires: Iterable[str] = (), tag: str = "py3-none-any") -> None:
    """Write a wheel without code into the index and link it."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Provides-Extra: {e}\n" for e in sorted(_extras(requires)))
    write_metadata_wheel(index, metadata + "".join(f"Requires-Dist: {r}\n" for r in requires), name, version, tag)


def write_metadata_wheel(index: Path, metadata: str, name: str, version: str, tag: str) -> None:
    """Write a wheel with this METADATA."""
    stem = f"{name.replace('-', '_')}-{version}"
    members = {
        f"{stem}.dist-info/METADATA": metadata.encode(),
        f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = f"{stem}.dist-info/RECORD"
    members[record] = record_text([record_row(n, d) for n, d in members.items()], record).encode()
    folder = index / canonicalize_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as out:
        for member, data in members.items():
            out.writestr(member, data)
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>\n")


def _extras(requires: Iterable[str]) -> set[str]:
    words = [r.partition("extra ==")[2].strip(" '\"") for r in requires]
    return {word for word in words if word}


def fill(index: Path, requirements: Sequence[str], without: Sequence[str]) -> list[str]:
    """A wheel for each project that is required, in a version which all of its requirements accept.

    Returns:
        Projects for which there is no such version among those that the requirements name.
    """
    wanted: dict[str, list[Requirement]] = {}
    for line in requirements:
        requirement = Requirement(line)
        wanted.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    impossible = []
    for name, asked in sorted(wanted.items()):
        if name in without:
            continue
        version = find_version([r.specifier for r in asked])
        if version is None:
            impossible.append(name)
            continue
        extras = sorted(set().union(*(r.extras for r in asked)))
        write_wheel(index, name, version, [f"stub-of-extras; extra == '{extra}'" for extra in extras])
    write_wheel(index, "stub-of-extras", "1.0")
    return impossible


def find_version(specifiers: Sequence[SpecifierSet]) -> str | None:
    """One that all accept: tried are the versions that they name, and their neighbours."""
    named = {Version(str(s.version).removesuffix(".*")) for group in specifiers for s in group}
    tried = sorted({*named, *itertools.chain(*map(_neighbours, named)), Version("1.0")})
    return next((str(v) for v in reversed(tried) if all(v in group for group in specifiers)), None)


def _neighbours(version: Version) -> list[Version]:
    major, minor, micro = (*version.release, 0, 0, 0)[:3]
    found = [f"{major}.{minor}.{micro + 1}", f"{major}.{minor + 1}", f"{major + 1}.0"]
    if micro:
        found.append(f"{major}.{minor}.{micro - 1}")
    if minor:
        found.append(f"{major}.{minor - 1}")
    return [Version(text) for text in found]
