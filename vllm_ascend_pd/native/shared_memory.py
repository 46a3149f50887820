# SPDX-License-Identifier: Apache-2.0
"""Shared memory by the C++ core: sealed memory files with all their pages, and mappings of them. Any thread.

Thin wrappers; `vllm_ascend_pd.memory` adds names, limits and the registry of a process's arenas.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import lru_cache
from typing import Final

from vllm_ascend_pd.native import library

_UINT64 = ctypes.c_uint64
_MAX_THREADS: Final = 4  # zeroing is bound by the memory bus


class _Functions:
    """The C functions, declared once."""

    def __init__(self) -> None:
        handle, integer = ctypes.c_void_p, ctypes.c_int
        declare = library.declare
        self.arena_create = declare("pd_arena_create", handle, [ctypes.c_char_p, _UINT64, integer])
        self.arena_free = declare("pd_arena_free", None, [handle])
        self.arena_fd = declare("pd_arena_fd", integer, [handle])
        self.arena_numa_errno = declare("pd_arena_numa_errno", integer, [handle])
        self.arena_address = declare("pd_arena_address", _UINT64, [handle])
        populate = [handle, _UINT64, _UINT64, ctypes.c_uint32, integer, ctypes.POINTER(_UINT64)]
        self.arena_populate = declare("pd_arena_populate", integer, populate)
        self.mapping_create = declare("pd_mapping_create", handle, [integer, _UINT64, integer])
        self.mapping_free = declare("pd_mapping_free", None, [handle])
        self.mapping_address = declare("pd_mapping_address", _UINT64, [handle])
        self.find_numa_node = declare("pd_find_numa_node", integer, [])


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    return _Functions()


def find_numa_node() -> int | None:
    """The node of this thread's CPUs; None with one node only, or when several are in use."""
    node = int(_functions().find_numa_node())
    return None if node < 0 else node


class MemoryFile:
    """A sealed memory file with its only writable mapping, at a 2 MiB-aligned address.

    Raises OSError from the constructor. The descriptor is the object's.
    """

    def __init__(self, name: str, num_bytes: int, numa_node: int | None) -> None:
        functions = _functions()
        node = -1 if numa_node is None else numa_node
        # At interpreter exit other threads may still touch the memory; the kernel frees it soon enough.
        self._handle = library.check_handle(functions.arena_create(name.encode(), num_bytes, node))
        weakref.finalize(self, functions.arena_free, self._handle).atexit = False
        self.fd = int(functions.arena_fd(self._handle))
        self.address = int(functions.arena_address(self._handle))
        self.numa_errno = int(functions.arena_numa_errno(self._handle))  # why the node was refused, or 0

    def populate(self, start: int, num_bytes: int, *, want_huge: bool) -> tuple[int, int]:
        """Make the pages of an aligned range, zeroed: (bytes in huge pages, errno for which the rest is not, or 0).

        Raises MemoryError, where a touch without memory behind it would have killed the process.
        """
        huge_bytes = _UINT64(0)
        num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        code = _functions().arena_populate(
            self._handle, start, num_bytes, num_threads, int(want_huge), ctypes.byref(huge_bytes)
        )
        return huge_bytes.value, library.check(code)


class FileMapping:
    """A shared file mapped at a 2 MiB-aligned address; the descriptor is not kept. Raises OSError."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        functions = _functions()
        handle = library.check_handle(functions.mapping_create(fd, num_bytes, int(writable)))
        self.address = int(functions.mapping_address(handle))
        self._unmap = weakref.finalize(self, functions.mapping_free, handle)
        self._unmap.atexit = False  # as above

    @property
    def is_closed(self) -> bool:
        """Whether the addresses are no longer valid."""
        return not self._unmap.alive

    def close(self) -> None:
        """Unmap; nobody may touch the addresses from here on."""
        self._unmap()
