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


class LinkWatcher(Protocol):
    """Is told of each link under its lock: nobody uses a link that `prepare` has not seen."""

    def prepare(self, peer: RankAddress) -> None:
        """The link has been made. Never raises."""

    def forget(self, cluster_id: int) -> None:
        """The link is being dropped."""


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
        """
        lock = self._lock_of(peer.cluster_id)
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LinkFailedError(f"link: to {peer.host}:{peer.port}: the deadline passed while it was being made")
        try:
            number = self._linked.get(peer.cluster_id)
            if number is not None:
                return number
            self._linker.link(peer, deadline)
            with self._guard:
                self._num_made += 1
                number = self._linked[peer.cluster_id] = self._num_made
            self._watcher.prepare(peer)
            return number
        finally:
            lock.release()

    def drop(self, cluster_ids: Iterable[int]) -> None:
        """Forget links of a peer that has ended, on this side only; unknown ones are ignored."""
        for cluster_id in cluster_ids:
            with self._lock_of(cluster_id):
                self._forget(cluster_id)
                self._linker.unlink(cluster_id)

    def drop_spoilt(self, cluster_id: int, number: int) -> None:
        """Take down the link `number`, unless somebody has done so and it is another one by now.

        Returns when it is down: until then its last transfer may still be writing, and the caller's blocks must not
        be used for anything else. A link that does not go down holds this thread, and /health names it.
        """
        with self._lock_of(cluster_id):
            if self._linked.get(cluster_id) != number:
                return
            self._forget(cluster_id)
            while not self._linker.unlink(cluster_id):
                self._pause(DROP_AGAIN_S)

    def _forget(self, cluster_id: int) -> None:
        self._watcher.forget(cluster_id)
        with self._guard:
            self._linked.pop(cluster_id, None)

    def _lock_of(self, cluster_id: int) -> threading.Lock:
        with self._guard:
            return self._locks[cluster_id]
