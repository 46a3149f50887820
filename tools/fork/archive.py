# SPDX-License-Identifier: Apache-2.0
"""A zip writer that can copy members without unpacking them, so that repacking a wheel takes seconds.

Our own members are stored uncompressed: the output then depends on no compressor version, and the same
inputs give the same bytes. No zip64: a wheel beyond 4 GB or 65,535 members is refused.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tools.fork.errors import ArtefactError

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_UTF8 = 0x800
_DATE_1980 = 0x21
_VERSION = 20
_UNIX = 3 << 8
_REGULAR = 0o100000


@dataclass(frozen=True)
class Member:
    """One file in the archive as its headers tell it; `mode` holds the Unix permission bits."""

    name: str
    method: int
    crc: int
    packed_bytes: int
    num_bytes: int
    mode: int

    @property
    def external(self) -> int:
        """The external attributes of the central directory: Unix mode of a regular file."""
        return (_REGULAR | self.mode) << 16


class ArchiveWriter:
    """Writes one zip file; use as a context manager, which writes the directory at the end."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("wb")
        self._entries: list[tuple[Member, int]] = []
        self._names: set[str] = set()

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write_directory()
        finally:
            self._out.close()

    def add(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Add a file, stored."""
        member = Member(name, zipfile.ZIP_STORED, zlib.crc32(data), len(data), len(data), mode)
        self._add(member, data)

    def copy(self, source: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> None:
        """Copy a member of another archive as it is packed there, under a new name."""
        if info.flag_bits & 1:
            raise ArtefactError(f"{source.filename}: member {info.filename!r} is encrypted")
        mode = (info.external_attr >> 16) & 0o777 or 0o644
        member = Member(name, info.compress_type, info.CRC, info.compress_size, info.file_size, mode)
        self._add(member, packed_bytes(source, info))

    def _add(self, member: Member, data: bytes) -> None:
        if member.name in self._names:
            raise ArtefactError(f"two members of the wheel are named {member.name!r}")
        self._names.add(member.name)
        at = self._out.tell()
        if at + len(data) >= 0xFFFFFFFF or len(self._entries) >= 0xFFFF:
            raise ArtefactError("the wheel would be beyond 4 GB or 65,535 members")
        self._entries.append((member, at))
        name = member.name.encode()
        self._out.write(_LOCAL.pack(b"PK\x03\x04", *_common(member), len(name), 0) + name)
        self._out.write(data)

    def _write_directory(self) -> None:
        start = self._out.tell()
        for member, at in self._entries:
            name = member.name.encode()
            head = _CENTRAL.pack(
                b"PK\x01\x02", _UNIX | _VERSION, *_common(member), len(name), 0, 0, 0, 0, member.external, at
            )
            self._out.write(head + name)
        size, count = self._out.tell() - start, len(self._entries)
        self._out.write(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0))


def _common(member: Member) -> tuple[int, ...]:
    """The fields that the local header and the directory share."""
    flags = 0 if member.name.isascii() else _UTF8
    sizes = (member.packed_bytes, member.num_bytes)
    return (_VERSION, flags, member.method, 0, _DATE_1980, member.crc, *sizes)


def packed_bytes(source: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a member as they are packed in its archive."""
    stream = source.fp
    assert stream is not None
    stream.seek(info.header_offset)
    head = _LOCAL.unpack(stream.read(_LOCAL.size))
    stream.seek(head[-2] + head[-1], 1)  # its name and extra field
    data = stream.read(info.compress_size)
    if head[0] != b"PK\x03\x04" or len(data) != info.compress_size:
        raise ArtefactError(f"{source.filename}: member {info.filename!r} is damaged")
    return data
