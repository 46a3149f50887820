# SPDX-License-Identifier: Apache-2.0
"""Private anonymous memory in huge pages where the system gives them, touched at once. Standard library only."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Final

ALIGNMENT: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14


class Pool:
    """`num_bytes` at a 2 MiB-aligned address, all touched."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes + ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // ALIGNMENT) * ALIGNMENT
        self._offset = self.address - start
        try:
            self._map.madvise(_MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: `huge_bytes` says 0
        ctypes.memset(self.address, 0xA5, num_bytes)

    @property
    def view(self) -> memoryview:
        """Writable bytes of the pool."""
        return memoryview(self._map)[self._offset : self._offset + self.num_bytes]


def count_huge_bytes(address: int) -> int:
    """How much of the mapping that holds `address` lies in huge pages, by /proc/self/smaps."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
            total += int(line.split()[1]) << 10
    return total
