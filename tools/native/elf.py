# SPDX-License-Identifier: Apache-2.0
"""Reads of a 64-bit little-endian ELF library what decides where it loads: machine, libraries, symbol versions.

Pure: bytes in. Also used by the wheel's builder, which must not depend on an ELF package.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from tools.cache import CacheError

MACHINES: Final = {62: "x86_64", 183: "aarch64"}
# glibc's own parts, which every machine with glibc has; anything else would have to be shipped.
SYSTEM_LIBRARIES: Final = frozenset(
    {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
    | {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
)
_HEADER: Final = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SHT_DYNAMIC, _SHT_VERNEED, _DT_NEEDED = 6, 0x6FFFFFFE, 1


@dataclass(frozen=True)
class Library:
    """One shared library as its headers tell it."""

    machine: str
    needed: tuple[str, ...]  # libraries
    versions: tuple[str, ...]  # symbol versions that it wants, such as GLIBC_2.17

    @property
    def glibc(self) -> tuple[int, ...]:
        """The newest glibc that one of its symbols asks for; (0,) for none."""
        found = (re.fullmatch(r"GLIBC_(\d+(?:\.\d+)*)", version) for version in self.versions)
        return max((tuple(int(x) for x in match[1].split(".")) for match in found if match), default=(0,))


def read_library(name: str, data: bytes) -> Library:
    """Parse a library.

    Raises:
        CacheError: not an ELF file of a machine that we build for, or cut off.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise CacheError(f"{name}: is not a 64-bit little-endian ELF file")
    try:
        return _read(name, data)
    except (struct.error, IndexError) as error:
        raise CacheError(f"{name}: is damaged: {error}") from None


def _read(name: str, data: bytes) -> Library:
    head = _HEADER.unpack_from(data)
    machine, table, size, count = head[1], head[5], head[10], head[11]
    if machine not in MACHINES:
        raise CacheError(f"{name}: is for ELF machine {machine}, want one of {', '.join(MACHINES.values())}")
    sections = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
    needed: list[str] = []
    versions: list[str] = []
    for _, kind, _, _, at, num_bytes, link, info, _, _ in sections:
        if kind == _SHT_DYNAMIC:
            entries = [struct.unpack_from("<qQ", data, at + i) for i in range(0, num_bytes, 16)]
            needed += [_text(data, sections[link][4] + value) for tag, value in entries if tag == _DT_NEEDED]
        elif kind == _SHT_VERNEED:
            versions += _read_versions(data, at, info, sections[link][4])
    return Library(MACHINES[machine], tuple(needed), tuple(sorted(set(versions))))


def _read_versions(data: bytes, at: int, num_files: int, strings: int) -> list[str]:
    found = []
    for _ in range(num_files):
        _, num_entries, _, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(num_entries):
            _, _, _, name, next_entry = struct.unpack_from("<IHHII", data, entry)
            found.append(_text(data, strings + name))
            entry += next_entry
        at += following
    return found


def _text(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    if end < 0:
        raise IndexError("a name runs past the end")
    return data[at:end].decode()


def check_library(name: str, data: bytes, machine: str, glibc: tuple[int, ...]) -> None:
    """Make sure that a library loads on any `machine` with that glibc or a newer one.

    Raises:
        CacheError: what it needs beyond that.
    """
    library = read_library(name, data)
    if library.machine != machine:
        raise CacheError(f"{name}: is built for {library.machine}, want {machine}")
    foreign = sorted(set(library.needed) - SYSTEM_LIBRARIES)
    if foreign:
        raise CacheError(f"{name}: needs {', '.join(foreign)}, which not every machine has")
    strange = [version for version in library.versions if not version.startswith("GLIBC_")]
    if strange or library.glibc > glibc:
        wanted = ", ".join(strange) or f"glibc {'.'.join(map(str, library.glibc))}"
        raise CacheError(f"{name}: needs {wanted}, want at most glibc {'.'.join(map(str, glibc))}")
