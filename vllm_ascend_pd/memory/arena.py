# SPDX-License-Identifier: Apache-2.0
"""A shared memory file that holds a rank's KV cache, populated at once.

The owner writes it; a peer on the same machine may map it read-only through its descriptor (the seals make
the kernel enforce both that and the size). Made by the model runner's allocation, registered with
`datadist` after that. The file has no name in any file system: it is gone when the last process that maps it
is, also after a kill -9. Arenas may be made and looked up from any thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from vllm_ascend_pd.memory.available import AvailableMemory, read_available_memory
from vllm_ascend_pd.memory.mapping import round_up
from vllm_ascend_pd.native.shared_memory import MemoryFile, find_numa_node

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 64 << 20  # between two looks at the memory that is left
_HEADROOM_BYTES: Final = 64 << 20  # left to the rest of the process

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

    def __init__(self, name: str, num_bytes: int, file: MemoryFile) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.huge_pages = "not tried"  # how much of it is in huge pages, or why it is not
        self.numa = "any node"  # where its pages are, or why not there
        self._file = file

    @classmethod
    def create(cls, num_bytes: int, name: str, *, want_huge: bool = True) -> Arena:
        """Allocate and populate an arena. Blocks about as long as zeroing the memory takes.

        The pages come from the NUMA node of this thread's CPUs, where they all belong to one.

        Raises ArenaMemoryError when memory is short, ValueError for a size that is not positive.
        """
        if num_bytes <= 0:
            raise ValueError(f"KV arena {name!r}: num_bytes must be positive, not {num_bytes}")
        available = read_available_memory()
        if round_up(num_bytes) + _HEADROOM_BYTES > available.num_bytes:
            raise ArenaMemoryError(name, num_bytes, available)
        node = find_numa_node()
        arena = cls(name, num_bytes, MemoryFile(name, num_bytes, node))
        if node is not None:
            refused = arena._file.numa_errno
            arena.numa = f"any node (mbind: {os.strerror(refused)})" if refused else f"node {node}"
        arena._populate(want_huge)
        with _registry_lock:
            _arenas.add(arena)
        return arena

    def _populate(self, want_huge: bool) -> None:
        """In pieces, with a look at the memory that is left before each."""
        total = round_up(self.num_bytes)
        huge_bytes, failure = 0, 0
        for start in range(0, total, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, total - start)
            self._check_room(start, size)
            try:
                got, code = self._file.populate(start, size, want_huge=want_huge and failure == 0)
            except MemoryError as error:
                raise self._short_of_memory(start, read_available_memory()) from error
            huge_bytes, failure = huge_bytes + got, failure or code
        self.huge_pages = f"{huge_bytes >> 20} of {total >> 20} MiB" if want_huge else "not wanted"
        if failure:
            self.huge_pages += f" (MADV_COLLAPSE: {os.strerror(failure)})"
        logger.info("KV arena %r: %d bytes, huge pages: %s, %s", self.name, self.num_bytes, self.huge_pages, self.numa)

    def _check_room(self, start: int, size: int) -> None:
        available = read_available_memory()
        if size + _HEADROOM_BYTES // 2 > available.num_bytes:
            raise self._short_of_memory(start, available)

    def _short_of_memory(self, start: int, available: AvailableMemory) -> ArenaMemoryError:
        """The error, with what the arena itself has taken so far (`start` bytes) counted as available."""
        taken = AvailableMemory(
            available.machine_bytes + start,
            None if available.cgroup_bytes is None else available.cgroup_bytes + start,
            available.cgroup_limit_bytes,
        )
        return ArenaMemoryError(self.name, self.num_bytes, taken)

    @property
    def fd(self) -> int:
        """Of the memory file; the arena's."""
        return self._file.fd

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 2 MiB."""
        return self._file.address

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
