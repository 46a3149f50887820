# SPDX-License-Identifier: Apache-2.0
"""A decode worker's links to prefill ranks over datadist: made on first use, dropped when spoilt or outdated.

Used by the pull threads; one lock per peer, so that a slow link never holds up another. How a link is made is the
linker's (`linking.py`); what a status code means is in `datadist/outcomes.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from vllm_ascend_pd.transfer.linking import Linker, LinkFailedError, OneSidedLinker
from vllm_ascend_pd.wire import RankAddress

logger = logging.getLogger(__name__)

DROP_AGAIN_S: Final = 1.0
DROP_WAIT_S: Final = 1.0  # for a thread that links to the same peer


class LinkWatcher(Protocol):
    """Is told of each link under its lock: nobody uses a link that `prepare` has not seen."""

    def prepare(self, peer: RankAddress) -> bool:
        """The link has been made. False: measuring it has left it undefined, and it is of no use. Never raises."""

    def forget(self, cluster_id: int) -> None:
        """The link is being dropped."""


class SpoiltLinkError(LinkFailedError):
    """A link was left undefined: nothing that its last transfer touched may be used before `take_down` says so."""

    def __init__(self, reason: str, cluster_id: int, number: int, *, has_touched_blocks: bool = False) -> None:
        super().__init__(reason)
        self.cluster_id = cluster_id
        self.number = number
        self.has_touched_blocks = has_touched_blocks


class LinkTable:
    """Links by the peer's cluster id (unique per process start, so a restarted peer is another one)."""

    def __init__(
        self,
        datadist: Any,
        module: Any,
        local_host: str,
        watcher: LinkWatcher,
        linker: Linker | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._linker = linker or OneSidedLinker(datadist, module, local_host)
        self._watcher = watcher
        self._pause = pause
        self._linked: dict[int, int] = {}  # cluster id -> which link to it this is
        self._going_down: set[int] = set()  # nobody may use them, and a transfer may still be writing
        self._num_made = 0
        self._locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()

    @property
    def cluster_ids(self) -> list[int]:
        """Linked now."""
        with self._guard:
            return sorted(self._linked)

    def ensure(self, peer: RankAddress, deadline: float) -> int:
        """Link if there is no link yet; which link it is, for `drop_spoilt`.

        Blocks at most until `deadline` (monotonic seconds), and while the link is measured.

        Raises:
            LinkFailedError: refused, timed out, or the peer's data plane disagrees.
            SpoiltLinkError: it was made, and measuring it left it undefined.
        """
        lock = self._lock_of(peer.cluster_id)
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LinkFailedError(f"link: to {peer.host}:{peer.port}: the deadline passed while it was being made")
        try:
            number = self._linked.get(peer.cluster_id)
            if number is not None:
                return number
            if peer.cluster_id in self._going_down and not self._try_to_unlink(peer.cluster_id):
                raise LinkFailedError(f"link: to {peer.host}:{peer.port}: the one before has not gone down yet")
            self._linker.link(peer, deadline)
            with self._guard:
                self._num_made += 1
                number = self._linked[peer.cluster_id] = self._num_made
            is_good = self._watcher.prepare(peer)
        finally:
            lock.release()
        if not is_good:
            reason = f"link: to {peer.host}:{peer.port}: measuring it ended undefined"
            raise SpoiltLinkError(reason, peer.cluster_id, number)
        return number

    def drop(self, cluster_ids: Iterable[int]) -> None:
        """Forget links of a peer that has ended, on this side only; unknown ones are ignored.

        What does not go down now is tried again by whoever failed over it, or wants it anew. A peer that somebody is
        linking to, or unlinking from, is left to them: this thread has other pulls to do.
        """
        for cluster_id in cluster_ids:
            lock = self._lock_of(cluster_id)
            if not lock.acquire(timeout=DROP_WAIT_S):
                logger.warning("link %d of a peer that has ended is in use by another thread: left to it", cluster_id)
                continue
            try:
                self._forget(cluster_id)
                self._try_to_unlink(cluster_id)
            finally:
                lock.release()

    def drop_spoilt(self, cluster_id: int, number: int) -> None:
        """`take_down` until it is."""
        while not self.take_down(cluster_id, number):
            self._pause(DROP_AGAIN_S)

    def take_down(self, cluster_id: int, number: int) -> bool:
        """Try once to take down the link `number`, unless it is another one by now; whether it is down.

        Until it is its last transfer may still be writing, and the caller's blocks must not be used for anything else.
        """
        with self._lock_of(cluster_id):
            if self._linked.get(cluster_id) == number:
                self._forget(cluster_id)
            return cluster_id not in self._going_down or self._try_to_unlink(cluster_id)

    def _forget(self, cluster_id: int) -> None:
        with self._guard:
            self._linked.pop(cluster_id, None)
            self._going_down.add(cluster_id)
        self._watcher.forget(cluster_id)

    def _try_to_unlink(self, cluster_id: int) -> bool:
        """Under the peer's lock."""
        try:
            is_down = self._linker.unlink(cluster_id)
        except Exception:  # then nobody knows: as if it had said no
            logger.exception("unlinking %d", cluster_id)
            is_down = False
        if is_down:
            with self._guard:
                self._going_down.discard(cluster_id)
        return is_down

    def _lock_of(self, cluster_id: int) -> threading.Lock:
        with self._guard:
            return self._locks[cluster_id]
