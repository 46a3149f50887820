# SPDX-License-Identifier: Apache-2.0
"""The smallest ELF libraries that have what `tools.native.elf` reads; written by the format's own specification."""

from __future__ import annotations

import struct
from collections.abc import Sequence

MACHINES = {"x86_64": 62, "aarch64": 183}
HEADER_BYTES, SECTION_BYTES = 64, 64


def make_library(
    machine: str | int = "x86_64",
    needed: Sequence[str] = ("libc.so.6",),
    versions: Sequence[str] = ("GLIBC_2.2.5", "GLIBC_2.17"),
) -> bytes:
    """A library for a machine, with DT_NEEDED entries and one version record per name."""
    strings = b"\0"
    at = {}
    for name in [*needed, *versions]:
        at[name] = len(strings)
        strings += name.encode() + b"\0"
    dynamic = b"".join(struct.pack("<qQ", 1, at[name]) for name in needed) + bytes(16)
    wanted = struct.pack("<HHIII", 1, len(versions), at[needed[0]] if needed else 0, 16, 0)
    for i, name in enumerate(versions):
        following = 16 if i + 1 < len(versions) else 0
        wanted += struct.pack("<IHHII", 0, 0, i + 2, at[name], following)
    body, table = b"", bytes(SECTION_BYTES)
    for kind, data, link, info in ((3, strings, 0, 0), (6, dynamic, 1, 0), (0x6FFFFFFE, wanted, 1, 1)):
        offset = HEADER_BYTES + len(body)
        table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, len(data), link, info, 1, 0)
        body += data
    number = MACHINES[machine] if isinstance(machine, str) else machine
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    start = HEADER_BYTES + len(body)
    return (
        ident
        + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, 0, start, 0, 64, 0, 0, SECTION_BYTES, 4, 0)
        + body
        + table
    )
