# SPDX-License-Identifier: Apache-2.0
"""One rank's staging buffer: slots of registered memory that large pulls read from and write to.

Made once, before the first link. The prefill side hands slots out by extract id (`server.py`); on the decode side
each pull thread takes one for as long as a chunk needs it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from vllm_ascend_pd.memory.arena import Arena
from vllm_ascend_pd.transfer.staging.chunks import GRANULE_BYTES, SLOT_BYTES
from vllm_ascend_pd.transfer.staging.copier import StagingError

GRANULES_PER_SLOT = SLOT_BYTES // GRANULE_BYTES


class Memory(Protocol):
    """Where the slots are; kept for as long as the buffer."""

    @property
    def address(self) -> int:
        """Of the first byte, on a 2 MiB boundary."""


class StagingBuffer:
    """`num_slots` slots in one piece of memory (nothing given: an arena), registered as a blocks cache of its own."""

    def __init__(self, num_slots: int, model_id: int, memory: Memory | None = None) -> None:
        self.num_slots = num_slots
        self.model_id = model_id
        self.cache: Any = None
        self._memory = memory or Arena.create(num_slots * SLOT_BYTES, "staging")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num_slots):
            self._free.put(slot)

    def register(self, module: Any, manager: Any, cluster_id: int) -> None:
        """Register with datadist. Raises LLMException."""
        shape = [self.num_slots * GRANULES_PER_SLOT, GRANULE_BYTES]
        self.cache = manager.register_blocks_cache(
            module.CacheDesc(1, shape, module.DataType.DT_UINT8),
            [self._memory.address],
            module.BlocksCacheKey(cluster_id, self.model_id),
            remote_accessible=True,
        )

    def address(self, slot: int) -> int:
        """Of the slot's first byte."""
        return self._memory.address + slot * SLOT_BYTES

    @contextmanager
    def slot(self, deadline: float, keeps: Callable[[BaseException], bool] = lambda _: False) -> Iterator[int]:
        """A slot of one's own (decode side). Raises StagingError when none gets free before `deadline`.

        `keeps` says of a failure that something may still write into the slot: then the caller gives it back, by `put`.
        """
        try:
            slot = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise StagingError("deadline: no staging slot got free in time") from None
        try:
            yield slot
        except BaseException as error:
            if not keeps(error):
                self.put(slot)
            raise
        else:
            self.put(slot)

    def put(self, slot: int) -> None:
        """Nothing writes into this slot any more."""
        self._free.put(slot)


class SlotTable:
    """Prefill side: which extract holds which slot, and until when. Guarded by its condition; any thread."""

    def __init__(self, num_slots: int, hold_s: float) -> None:
        self._hold_s = hold_s
        self._changed = threading.Condition()
        self._holders: list[str] = [""] * num_slots
        self._until: list[float] = [0.0] * num_slots
        self._being_filled: set[int] = set()

    def take(self, extract_id: str, deadline: float) -> int | None:
        """A slot to fill, held for `extract_id`; None when none gets free, or overdue, before `deadline`.

        An overdue slot's reader has stopped reading, or finds out when it frees it.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                slot = self._find(now)
                if slot is not None:
                    self._holders[slot], self._until[slot] = extract_id, now + self._hold_s
                    self._being_filled.add(slot)
                    return slot
                wait_s = min(deadline, *(until for until in self._until)) - now
                if deadline <= now:
                    return None
                self._changed.wait(max(0.001, wait_s))

    def _find(self, now: float) -> int | None:
        for slot, holder in enumerate(self._holders):
            if slot not in self._being_filled and (not holder or self._until[slot] <= now):
                return slot
        return None

    def filled(self, slot: int) -> None:
        """The slot's bytes are there; the reader's time begins."""
        with self._changed:
            self._being_filled.discard(slot)
            self._until[slot] = time.monotonic() + self._hold_s

    def find(self, extract_id: str) -> int | None:
        """The slot that this extract holds."""
        with self._changed:
            return self._holders.index(extract_id) if extract_id in self._holders else None

    def free(self, extract_id: str) -> bool:
        """Give back; whether the slot was this extract's until now."""
        with self._changed:
            if extract_id not in self._holders:
                return False
            slot = self._holders.index(extract_id)
            if slot in self._being_filled:
                return False
            self._holders[slot] = ""
            self._changed.notify_all()
            return True

    def num_held(self) -> int:
        """For status."""
        with self._changed:
            return sum(1 for holder in self._holders if holder)
