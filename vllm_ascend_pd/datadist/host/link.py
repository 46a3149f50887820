# SPDX-License-Identifier: Apache-2.0
"""One link to one peer: the C++ plane's connections in both directions, the peer's caches as they were when the link
was made, and the mappings of its arenas.

One transfer at a time: the mutex covers a whole pull or push, and waiting for it counts against the caller's
deadline. After a timeout or the peer's death the link is spoiled: every later call is LLM_NOT_YET_LINK until
it is unlinked and linked again. Any thread may call; bytes move in the caller's, without the interpreter's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn

from vllm_ascend_pd.datadist.host.framing import BadFrame
from vllm_ascend_pd.datadist.host.messages import CacheEntry
from vllm_ascend_pd.datadist.host.runs import max_request_words
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, to_status
from vllm_ascend_pd.memory.mapping import SharedMapping
from vllm_ascend_pd.native.plane import LinkStats, LinkStatus, Moves, NativeLink, Outcome

logger = logging.getLogger(__name__)

# Outcomes that leave the link useless, and what the caller gets to see.
_SPOILING: Final = {
    LinkStatus.TIMEOUT: LLMStatusCode.LLM_TIMEOUT,
    LinkStatus.PEER_GONE: LLMStatusCode.LLM_TIMEOUT,
    LinkStatus.PEER_UNLINKED: LLMStatusCode.LLM_NOT_YET_LINK,
    LinkStatus.CLOSED: LLMStatusCode.LLM_NOT_YET_LINK,
    LinkStatus.BAD_FRAME: LLMStatusCode.LLM_FAILED,
    LinkStatus.LOCAL_FAULT: LLMStatusCode.LLM_FAILED,
}


def check_entries(entries: Sequence[CacheEntry], mappings: dict[int, SharedMapping] | None) -> None:
    """Raise BadFrame unless a peer's caches make sense and lie inside what it passed."""
    for entry in entries:
        tensors = entry.num_tensors
        shaped = 0 < tensors < 2**32 and 0 < entry.num_slots <= entry.tensor_bytes < 2**62
        placed = len(entry.arena_ids) == len(entry.arena_offsets) == (tensors if entry.accessible else 0)
        if not shaped or not placed or not -(2**63) <= entry.cache_id < 2**63:
            raise BadFrame(f"cache {entry.cache_id} of the peer makes no sense")
        for number, offset in zip(entry.arena_ids, entry.arena_offsets, strict=True):
            mapping = (mappings or {}).get(number)
            if mapping and not 0 <= offset <= mapping.num_bytes - entry.tensor_bytes:
                raise BadFrame(f"cache {entry.cache_id} of the peer is outside its arena {number}")


@dataclass(frozen=True)
class PeerCaches:
    """What a new link knows of its peer."""

    cluster_id: int
    entries: list[CacheEntry]
    mappings: dict[int, SharedMapping] | None

    @property
    def transport(self) -> str:
        """How bytes come from this peer: `mapped` when all it serves is mapped here, else `tcp`."""
        if self.mappings is None:
            return "tcp"
        served = [entry for entry in self.entries if entry.accessible]
        return "mapped" if all(self.find_mapped(entry) is not None for entry in served) else "tcp"

    def find_mapped(self, entry: CacheEntry) -> list[int] | None:
        """Where the cache's tensors lie here; None unless all of them are mapped."""
        mappings = self.mappings
        if mappings is None or not entry.arena_ids or not all(number in mappings for number in entry.arena_ids):
            return None
        places = zip(entry.arena_ids, entry.arena_offsets, strict=True)
        return [mappings[number].address + offset for number, offset in places]


class Link:
    """A usable link; made by `watching`."""

    def __init__(
        self,
        peer: PeerCaches,
        native: NativeLink,
        last_local_cache_id: int,
        *,
        accepted: bool,
        is_own: bool,
    ) -> None:
        self.cluster_id = peer.cluster_id
        self.entries = peer.entries
        self.last_local_cache_id = last_local_cache_id
        self.accepted = accepted
        self.is_own = is_own  # the accepting end of a link to ourselves
        self._native = native
        self._peer = peer  # keeps its memory mapped
        self._mutex = threading.Lock()  # one transfer at a time
        self._spoiled_by = ""  # why it is of no use any more
        for entry in peer.entries:
            native.add_cache(entry.cache_id, entry.num_tensors, entry.tensor_bytes, peer.find_mapped(entry))

    @property
    def is_live(self) -> bool:
        """False once spoiled or closed."""
        return self._spoiled_by == ""

    @property
    def transport(self) -> str:
        """How bytes come from this peer: `mapped` or `tcp`."""
        return self._peer.transport

    @property
    def stats(self) -> LinkStats:
        """What its transfers took so far."""
        return self._native.stats()

    @contextmanager
    def transfer(self, deadline: float) -> Iterator[None]:
        """Hold the link for one transfer. Raises LLMException: LLM_TIMEOUT, LLM_NOT_YET_LINK."""
        if not self._mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._spoil("timeout while queueing")
            fail(LLMStatusCode.LLM_TIMEOUT, f"cluster {self.cluster_id}: timeout while another transfer runs")
        try:
            if self._spoiled_by:
                fail(
                    LLMStatusCode.LLM_NOT_YET_LINK,
                    f"cluster {self.cluster_id}: unlink and link again ({self._spoiled_by})",
                )
            yield
        finally:
            self._mutex.release()

    def read(self, entry: CacheEntry, local_cache_id: int, moves: Moves, deadline: float) -> None:
        """Inside `transfer`: peer's bytes to local tensors. Raises LLMException."""
        limit = max_request_words()
        how = self._native.transfer(local_cache_id, entry.cache_id, moves, limit, deadline, is_write=False)
        if how.status != LinkStatus.OK:
            self._refuse(how, moves, remote="source", local="destination")

    def write(self, entry: CacheEntry, local_cache_id: int, moves: Moves, deadline: float) -> None:
        """Inside `transfer`: local bytes to the peer's tensors. Raises LLMException."""
        limit = max_request_words()
        how = self._native.transfer(local_cache_id, entry.cache_id, moves, limit, deadline, is_write=True)
        if how.status != LinkStatus.OK:
            self._refuse(how, moves, remote="destination", local="source")

    def _refuse(self, how: Outcome, moves: Moves, *, remote: str, local: str) -> NoReturn:
        if how.status in _SPOILING:
            self._spoil(how.text)
            fail(_SPOILING[how.status], f"cluster {self.cluster_id}: {how.text}")
        if how.status == LinkStatus.REFUSED:
            fail(to_status(how.peer_status), f"cluster {self.cluster_id} refused: {how.text}")
        texts = {
            LinkStatus.BAD_REMOTE_BLOCK: f"{remote} block {how.value} is outside the peer's cache",
            LinkStatus.BAD_LOCAL_BLOCK: f"{local} block {how.value} is outside the local cache",
            LinkStatus.TOO_MANY_RUNS: f"{moves.num_tensors} tensors and {how.value} runs exceed one request",
        }
        fail(LLMStatusCode.LLM_PARAM_INVALID, f"cluster {self.cluster_id}: {texts.get(how.status, how.text)}")

    def _spoil(self, reason: str) -> None:
        if not self._spoiled_by:
            self._spoiled_by = reason
            logger.warning("cluster_id=%d: link spoiled: %s", self.cluster_id, reason)

    def close(self, timeout_s: float, reason: str) -> None:
        """Tear down this side: waits for the transfer that runs and for answers on their way, says farewell."""
        deadline = time.monotonic() + timeout_s
        is_free = self._mutex.acquire(timeout=timeout_s)
        try:
            self._spoiled_by = self._spoiled_by or reason
            if not is_free:
                self._native.cut()
            self._native.close(deadline - time.monotonic())
        finally:
            if is_free:
                self._mutex.release()
