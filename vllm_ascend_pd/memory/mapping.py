# SPDX-License-Identifier: Apache-2.0
"""Mappings of shared files at 2 MiB-aligned addresses, and the few libc calls that Python does not offer.

`mmap.mmap` cannot ask for an alignment, so an anonymous range that is one alignment too long is reserved and
the file is mapped over its aligned part. Usable from any thread; a mapping ends when its object is closed or
collected, whichever comes first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from typing import Final

ALIGNMENT: Final = 2 << 20  # the alignment of registered bases, and the size of a huge page

MADV_POPULATE_READ: Final = 22  # Linux 5.14
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
MADV_COLLAPSE: Final = 25  # Linux 6.1

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that holds `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def advise(address: int, num_bytes: int, advice: int) -> int:
    """`madvise`; the errno, 0 on success. The GIL is released."""
    return 0 if _libc.madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()


def _map(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {num_bytes} bytes: {os.strerror(code)}")
    return int(result)


class SharedMapping:
    """One file mapped at an aligned address. The descriptor is not kept.

    Raises OSError (ENOMEM: no address space) from the constructor.
    """

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        if num_bytes <= 0:
            raise OSError(errno.EINVAL, f"cannot map {num_bytes} bytes")
        self.num_bytes = round_up(num_bytes)
        reserved = self.num_bytes + ALIGNMENT
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        base = _map(None, reserved, _PROT_NONE, flags, -1)
        self.address = round_up(base)
        tail = self.address + self.num_bytes
        try:
            protection = _PROT_READ | (_PROT_WRITE if writable else 0)
            _map(self.address, self.num_bytes, protection, _MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(base, reserved)
            raise
        if self.address > base:
            _libc.munmap(base, self.address - base)
        if base + reserved > tail:
            _libc.munmap(tail, base + reserved - tail)
        self._unmap = weakref.finalize(self, _libc.munmap, self.address, self.num_bytes)
        # At interpreter exit other threads may still touch the memory; the kernel unmaps soon enough.
        self._unmap.atexit = False

    @property
    def is_closed(self) -> bool:
        """Whether the addresses are no longer valid."""
        return not self._unmap.alive

    def close(self) -> None:
        """Unmap; nobody may touch the addresses from here on."""
        self._unmap()
