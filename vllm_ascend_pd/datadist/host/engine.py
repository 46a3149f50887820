# SPDX-License-Identifier: Apache-2.0
"""The host engine: one per process while initialised. Links, transfers, listeners.

Calls may come from any thread and run concurrently; `finalize` waits for them (§4.8). Pulls on one link are
serialised by the link, pushes process-wide.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from vllm_ascend_pd.datadist.host.accepting import Acceptor
from vllm_ascend_pd.datadist.host.dialling import Dialler
from vllm_ascend_pd.datadist.host.identity import SOCKET_PREFIX, Identity
from vllm_ascend_pd.datadist.host.link import Link
from vllm_ascend_pd.datadist.host.linktable import LinkTable
from vllm_ascend_pd.datadist.host.options import EngineOptions
from vllm_ascend_pd.datadist.host.runs import check_blocks
from vllm_ascend_pd.datadist.host.server import Listener, ServerCounters, listen_tcp, listen_unix
from vllm_ascend_pd.datadist.host.table import CacheTable
from vllm_ascend_pd.datadist.host.transfers import (
    PullRequest,
    PushRequest,
    check_local_memory,
    check_local_pull,
    plan_pull,
    plan_push,
    resolve,
)
from vllm_ascend_pd.datadist.host.watching import LinkWatcher
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import LLMClusterInfo, to_ip_text
from vllm_ascend_pd.native.plane import NativePlane
from vllm_ascend_pd.native.pool import get_shared_pool

logger = logging.getLogger(__name__)

_POOL_THREADS: Final = 16  # Source: datadist-api.md §1.2
_JOIN_S: Final = 5.0


class Engine:
    """See the module. Made by LLMDataDist.init."""

    def __init__(self, cluster_id: int, options: EngineOptions) -> None:
        self.options = options
        self.plane = NativePlane(options.num_threads, options.sync_timeout_ms, get_shared_pool())
        self.caches = CacheTable(self.plane)
        self.links = LinkTable()
        self._watcher = LinkWatcher(self.plane, self.links, options.sync_timeout_ms / 1000)
        self.preparing: set[int] = set()  # peers whose two-sided link is being made; see two_sided
        self._identity = Identity(cluster_id, options, self.caches, self.links, self._watcher)
        self.acceptor = Acceptor(self._identity)
        self.dialler = Dialler(self._identity)
        self._gate = threading.Condition()  # guards _running, _closed
        self._running = 0
        self._closed = False
        self._push_lock = threading.Lock()  # pushes are serialised process-wide
        self._listener_lock = threading.Lock()  # guards the two listeners
        self._tcp: Listener | None = None
        self._unix: Listener | None = None
        if options.listen is not None:
            try:
                self._start_listening(options.listen)
            except BaseException:
                self._close_plane()
                raise

    def _close_plane(self) -> None:
        self._watcher.close(_JOIN_S)
        self.plane.close()

    @property
    def cluster_id(self) -> int:
        """Own id."""
        return self._identity.cluster_id

    @property
    def listen_port(self) -> int | None:
        """The port that peers link to; None when this process does not listen."""
        return self._tcp.port if self._tcp else None

    @property
    def counters(self) -> ServerCounters:
        """What became of incoming connections."""
        return self._tcp.counters if self._tcp else ServerCounters()

    def _start_listening(self, address: tuple[str, int]) -> None:
        try:
            sock = listen_tcp(address)
        except OSError as error:
            fail(LLMStatusCode.LLM_FAILED, f"cannot listen on {address[0]}:{address[1]}: {error}")
        self._offer_descriptors()
        self._tcp = Listener(sock, self.options.secret, self.acceptor.serve_tcp, "datadist-listener")

    def _offer_descriptors(self) -> None:
        if self.options.transport != "tcp" and self._unix is None:
            name = SOCKET_PREFIX + secrets.token_hex(16)
            try:
                unix = listen_unix(name)
                self._unix = Listener(unix, self.options.secret, self.acceptor.serve_unix, "datadist-descriptors")
                self.acceptor.descriptor_socket = name
            except OSError as error:
                logger.warning("no descriptor socket, peers will use TCP: %s", error)

    def open_listener(self, address: tuple[str, int]) -> Listener | None:
        """One more listener for links, for the caller to close; None: this engine listens there already.

        Raises OSError.
        """
        with self._listener_lock:
            if self._tcp is not None and self.options.listen is not None and address[1] == self._tcp.port:
                return None
            sock = listen_tcp(address)
            self._offer_descriptors()
            return Listener(sock, self.options.secret, self.acceptor.serve_tcp, "datadist-rank")

    def _stop_listening(self) -> None:
        self.acceptor.descriptor_socket = ""
        for listener in (self._tcp, self._unix):
            if listener is not None:
                listener.close()
        self._tcp = self._unix = None

    def switch_listening(self, address: tuple[str, int] | None) -> None:
        """Become, stay or stop being a server (§1.4). Raises LLMException."""
        if self.links.has_live():
            fail(LLMStatusCode.LLM_EXIST_LINK, "switch_role while links exist")
        with self._listener_lock:
            if address is not None and self._tcp is not None and address[1] in (self._tcp.port, 0):
                return
            self._stop_listening()
            if address is not None:
                self._start_listening(address)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around every call. Raises LLMException(LLM_PARAM_INVALID) once finalised."""
        with self._gate:
            require(not self._closed, "llm datadist has been finalized")
            self._running += 1
        try:
            yield
        finally:
            with self._gate:
                self._running -= 1
                self._gate.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether finalize has begun."""
        return self._closed

    def finalize(self) -> None:
        """Wait for running calls, close all links and listeners, join all threads."""
        with self._gate:
            self._closed = True
            while self._running:
                self._gate.wait()
        self._close_links()
        with self._listener_lock:
            self._stop_listening()
        self._close_links()  # those that were being accepted meanwhile
        self._close_plane()

    def _close_links(self) -> None:
        for link in self.links.all():
            self.links.remove(link)
            link.close(self._identity.timeout_s, "finalized")

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout_ms: int
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """One status per peer, and the last that is not success."""

        def one(info: LLMClusterInfo) -> LLMStatusCode:
            local_given = len(info.local_ip_info_list) == 1 or self.options.has_comm_res
            if len(info.remote_ip_info_list) != 1 or not local_given or info.remote_cluster_id is None:
                return LLMStatusCode.LLM_PARAM_INVALID
            ip, port = info.remote_ip_info_list[0]
            return self.dialler.link(info.remote_cluster_id, (to_ip_text(ip), port), timeout_ms)

        return _run_each(clusters, one)

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout_ms: int, force: bool
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """One status per peer, and the last that is not success."""

        def one(info: LLMClusterInfo) -> LLMStatusCode:
            assert info.remote_cluster_id is not None
            if force:
                return self.dialler.unlink(info.remote_cluster_id, None, timeout_ms)
            if len(info.remote_ip_info_list) != 1:
                return LLMStatusCode.LLM_PARAM_INVALID
            ip, port = info.remote_ip_info_list[0]
            return self.dialler.unlink(info.remote_cluster_id, (to_ip_text(ip), port), timeout_ms)

        return _run_each(clusters, one)

    def get_link(self, cluster_id: int) -> Link:
        """The link to that peer. Raises LLMException(LLM_NOT_YET_LINK)."""
        link = self.links.get(cluster_id)
        if link is None or cluster_id in self.preparing:
            fail(LLMStatusCode.LLM_NOT_YET_LINK, f"cluster {cluster_id} is not linked")
        return link

    def pull(self, request: PullRequest) -> None:
        """Remote bytes to a local cache; returns when they are there. Raises LLMException (§4.3)."""
        deadline = time.monotonic() + self._identity.timeout_s
        cluster_id = request.key.cluster_id
        require(cluster_id != self.cluster_id, f"cluster {cluster_id} is this process")
        with self.caches.use(request.cache_id) as local:
            check_local_pull(local, request)
            link = self.get_link(cluster_id)
            if request.blocks is not None:
                check_blocks("destination", request.blocks[1], local.num_slots)
            check_local_memory(local, link.last_local_cache_id)
            with link.transfer(deadline):
                entry, batch_index = resolve(link.entries, request.key)
                link.read(entry, local.cache_id, plan_pull(local, entry, batch_index, request), deadline)

    def push(self, request: PushRequest) -> None:
        """Local bytes to a remote cache, layer by layer, each with its own timeout. Raises LLMException (§4.5)."""
        with self._push_lock, self.caches.use(request.cache_id) as local:
            link = self.get_link(request.key.cluster_id)
            check_local_memory(local, link.last_local_cache_id)
            entry, batch_index = resolve(link.entries, request.key)
            for moves in plan_push(local, entry, batch_index, request):
                deadline = time.monotonic() + self._identity.timeout_s
                with link.transfer(deadline):
                    link.write(entry, local.cache_id, moves, deadline)


def _run_each(
    clusters: Sequence[LLMClusterInfo], one: Callable[[LLMClusterInfo], LLMStatusCode]
) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    if not clusters:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    if len(clusters) == 1:
        results = [one(clusters[0])]
    else:
        with ThreadPoolExecutor(min(_POOL_THREADS, len(clusters)), "datadist-dial") as pool:
            results = list(pool.map(one, clusters))
    failures = [status for status in results if status != LLMStatusCode.LLM_SUCCESS]
    return (failures[-1] if failures else LLMStatusCode.LLM_SUCCESS), results
