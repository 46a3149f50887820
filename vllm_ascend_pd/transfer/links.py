# SPDX-License-Identifier: Apache-2.0
"""A decode worker's links to prefill ranks over datadist: made on first use, dropped when spoilt or outdated.

Used by the pull threads; one lock per peer, so that a slow link never holds up another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.wire import RankAddress

logger = logging.getLogger(__name__)

LINK_TIMEOUT_MS = 5000


class LinkFailedError(PDError):
    """No link to a prefill rank; the message names its address and the status code."""


class LinkWatcher(Protocol):
    """Is told of each link under its lock: nobody uses a link that `prepare` has not seen."""

    def prepare(self, peer: RankAddress) -> None:
        """The link has been made. Never raises."""

    def forget(self, cluster_id: int) -> None:
        """The link is being dropped."""


class LinkTable:
    """Links by the peer's cluster id (unique per process start, so a restarted peer is another one)."""

    def __init__(self, datadist: Any, module: Any, local_host: str, watcher: LinkWatcher) -> None:
        self._datadist = datadist
        self._module = module
        self._local_host = local_host
        self._watcher = watcher
        self._linked: set[int] = set()
        self._locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()

    @property
    def cluster_ids(self) -> list[int]:
        """Linked now."""
        with self._guard:
            return sorted(self._linked)

    def ensure(self, peer: RankAddress, deadline: float) -> None:
        """Link if there is no link yet. Blocks at most until `deadline` (monotonic seconds), and while it is measured.

        Raises:
            LinkFailedError: refused, timed out, or the peer's data plane disagrees.
        """
        with self._lock_of(peer.cluster_id):
            if peer.cluster_id in self._linked:
                return
            timeout_ms = min(LINK_TIMEOUT_MS, int((deadline - time.monotonic()) * 1000))
            if timeout_ms <= 0:
                raise LinkFailedError(f"link: to {peer.host}:{peer.port}: the deadline has passed")
            codes = self._module.LLMStatusCode
            try:
                _, (code,) = self._datadist.link_clusters([self._cluster(peer)], timeout_ms)
            except self._module.LLMException as error:
                raise LinkFailedError(f"link: to {peer.host}:{peer.port} (rank {peer.tp_rank}): {error}") from error
            if code not in (codes.LLM_SUCCESS, codes.LLM_ALREADY_LINK):
                raise LinkFailedError(f"link: to {peer.host}:{peer.port} (rank {peer.tp_rank}): {code!s}")
            with self._guard:
                self._linked.add(peer.cluster_id)
            self._watcher.prepare(peer)

    def drop(self, cluster_ids: Iterable[int]) -> None:
        """Forget links, on this side only; unknown ones are ignored."""
        for cluster_id in cluster_ids:
            with self._lock_of(cluster_id):
                self._watcher.forget(cluster_id)
                cluster = self._module.LLMClusterInfo()
                cluster.remote_cluster_id = cluster_id
                try:
                    self._datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS, True)
                except self._module.LLMException as error:
                    logger.warning("unlinking %d: %s", cluster_id, error)
                with self._guard:
                    self._linked.discard(cluster_id)

    def _lock_of(self, cluster_id: int) -> threading.Lock:
        with self._guard:
            return self._locks[cluster_id]

    def _cluster(self, peer: RankAddress) -> Any:
        cluster = self._module.LLMClusterInfo()
        cluster.remote_cluster_id = peer.cluster_id
        cluster.append_local_ip_info(self._local_host, 0)
        cluster.append_remote_ip_info(peer.host, peer.port)
        return cluster
