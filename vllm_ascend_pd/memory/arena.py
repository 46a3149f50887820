# SPDX-License-Identifier: Apache-2.0
"""A shared memory file that holds a rank's KV cache, populated at once.

The owner writes it; a peer on the same machine may map it read-only through its descriptor (the seals make
the kernel enforce both that and the size). Made by the model runner's allocation, registered with
`datadist` after that. The file has no name in any file system: it is gone when the last process that maps it
is, also after a kill -9. Arenas may be made and looked up from any thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from vllm_ascend_pd.memory.available import AvailableMemory, read_available_memory
from vllm_ascend_pd.memory.mapping import (
    ALIGNMENT,
    MADV_COLLAPSE,
    MADV_POPULATE_WRITE,
    SharedMapping,
    advise,
    round_up,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 64 << 20  # between two looks at the memory that is left
_HEADROOM_BYTES: Final = 64 << 20  # left to the rest of the process
_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10

_registry_lock = threading.Lock()  # guards _arenas; nothing else is taken under it
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


class ArenaMemoryError(MemoryError):
    """The arena does not fit: lower the size of the KV cache, or allow the process more memory."""

    def __init__(self, name: str, wanted_bytes: int, available: AvailableMemory) -> None:
        self.wanted_bytes = wanted_bytes
        self.available = available
        super().__init__(
            f"KV arena {name!r}: {wanted_bytes} bytes ({wanted_bytes >> 20} MiB) wanted, "
            f"{available.num_bytes} bytes ({available.num_bytes >> 20} MiB) available "
            f"({available.describe()}); "
            "make the KV cache smaller or allow more memory"
        )


class Arena:
    """Zero-filled shared memory at a 2 MiB-aligned address. Make one with `create`."""

    def __init__(self, name: str, fd: int, num_bytes: int, mapping: SharedMapping) -> None:
        self.name = name
        self.fd = fd
        self.num_bytes = num_bytes
        self.huge_pages = "not tried"  # how much of it is in huge pages, or why it is not
        self._mapping = mapping
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._close_fd.atexit = False

    @classmethod
    def create(cls, num_bytes: int, name: str) -> Arena:
        """Allocate and populate an arena. Blocks about as long as zeroing the memory takes.

        Raises ArenaMemoryError when memory is short, ValueError for a size that is not positive.
        """
        if num_bytes <= 0:
            raise ValueError(f"KV arena {name!r}: num_bytes must be positive, not {num_bytes}")
        available = read_available_memory()
        if round_up(num_bytes) + _HEADROOM_BYTES > available.num_bytes:
            raise ArenaMemoryError(name, num_bytes, available)
        fd = os.memfd_create(f"vllm-pd:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, round_up(num_bytes))
            mapping = SharedMapping(fd, num_bytes, writable=True)
            # The owner's mapping stays writable; nobody can make another writable one.
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        arena = cls(name, fd, num_bytes, mapping)
        arena._populate()
        with _registry_lock:
            _arenas.add(arena)
        return arena

    def _populate(self) -> None:
        """Huge pages first (touch one small page of each, collapse it), then whatever is still missing."""
        collapsed, failure = 0, 0
        for start in range(0, self._mapping.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, self._mapping.num_bytes - start)
            self._check_room(start, size)
            if failure == 0:
                for page in range(start, start + size, ALIGNMENT):
                    ctypes.memset(self.address + page, 0, 1)
                failure = advise(self.address + start, size, MADV_COLLAPSE)
                collapsed += size if failure == 0 else 0
            if advise(self.address + start, size, MADV_POPULATE_WRITE) != 0:
                self._touch(start, size)
        self.huge_pages = f"{collapsed >> 20} of {self._mapping.num_bytes >> 20} MiB"
        if failure:
            self.huge_pages += f" (MADV_COLLAPSE: {os.strerror(failure)})"
        logger.info("KV arena %r: %d bytes, huge pages: %s", self.name, self.num_bytes, self.huge_pages)

    def _check_room(self, start: int, size: int) -> None:
        available = read_available_memory()
        if size + _HEADROOM_BYTES // 2 > available.num_bytes:
            taken = AvailableMemory(
                available.machine_bytes + start,
                None if available.cgroup_bytes is None else available.cgroup_bytes + start,
                available.cgroup_limit_bytes,
            )
            raise ArenaMemoryError(self.name, self.num_bytes, taken)

    def _touch(self, start: int, size: int) -> None:
        for page in range(start, start + size, mmap.PAGESIZE):
            ctypes.memset(self.address + page, 0, 1)

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 2 MiB."""
        return self._mapping.address

    @property
    def buffer(self) -> memoryview:
        """All `num_bytes`, writable. The arena lives at least as long as the view."""
        array: Any = (ctypes.c_char * self.num_bytes).from_address(self.address)
        array.arena = self
        return memoryview(array).cast("B")

    def as_tensor(self) -> torch.Tensor:
        """`[num_bytes] int8` over the arena, which lives at least as long as the tensor's storage."""
        import torch

        return torch.frombuffer(self.buffer, dtype=torch.int8)

    def contains(self, address: int, num_bytes: int) -> bool:
        """Whether the range is wholly inside."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


def find_arena(address: int, num_bytes: int) -> tuple[Arena, int] | None:
    """The live arena of this process that holds the whole range, and the range's offset in it."""
    with _registry_lock:
        arenas = list(_arenas)
    for arena in arenas:
        if arena.contains(address, num_bytes):
            return arena, address - arena.address
    return None
