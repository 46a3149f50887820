# SPDX-License-Identifier: Apache-2.0
"""Two-sided links: all members call `link` with one rank table and poll until it is ready (§1.3).

Each member listens at its address of the table. Of two members the lower rank dials: it meets the other (`comm`),
and when both have called `link` with the same name and table it makes an ordinary link. Preparation runs in 16
threads of this class, joins are answered in the listener's. `_lock` guards the tables and is not held while waiting.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from vllm_ascend_pd.datadist.host.channel import NotAuthenticated
from vllm_ascend_pd.datadist.host.comm import GO, REFUSED, WAIT, Comm, Join, Linked, Verdict, receive, send
from vllm_ascend_pd.datadist.host.engine import Engine
from vllm_ascend_pd.datadist.host.framing import ChannelError, close
from vllm_ascend_pd.datadist.host.link import Link
from vllm_ascend_pd.datadist.host.rank_table import Address, BadRankTable, parse_rank_table
from vllm_ascend_pd.datadist.host.server import Listener
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import RegisterMemStatus

logger = logging.getLogger(__name__)

MAX_COMMS: Final = 512  # Source: datadist-api.md §1.3
_THREADS: Final = 16
_DEFAULT_TOTAL_S: Final = 120
_MEET_AGAIN_S: Final = 0.02
_ONE_LINK_S: Final = 10.0
_SETTLE_S: Final = 15.0


class _Rejected(Exception):
    """The preparation cannot succeed any more."""


def parse_link_time(options: dict[str, str]) -> tuple[float, int]:
    """(seconds in all, tries) of the preparation. Raises LLMException(LLM_PARAM_INVALID)."""
    text = options.get("llm.LinkTotalTime", "0")
    require(text.isdecimal() and int(text) < 2**32, f"llm.LinkTotalTime must be seconds, not {text!r}")
    total = int(text)
    if total == 0:
        given = os.environ.get("HCCL_CONNECT_TIMEOUT", "")
        total = int(given) if given.isdecimal() and int(given) > 0 else _DEFAULT_TOTAL_S
    return float(total), int(options.get("llm.LinkRetryCount", "1"))


class TwoSidedLinks:
    """All comms of one engine."""

    def __init__(self, engine: Engine, link_time: tuple[float, int]) -> None:
        self._engine = engine
        self._total_s, self._tries = link_time
        self._lock = threading.Lock()  # guards everything below, and engine.preparing
        self._comms: dict[int, Comm] = {}
        self._owners: dict[int, Comm] = {}  # peer -> the comm that made, or makes, its link
        self._listeners: dict[Address, tuple[Listener | None, int]] = {}  # and how many comms use it
        self._next_id = 1
        self._pool: ThreadPoolExecutor | None = None
        engine.acceptor.serve_join = self._serve_join

    @property
    def has_live(self) -> bool:
        """Whether any is ready or in preparation."""
        with self._lock:
            return any(comm.status != RegisterMemStatus.FAILED for comm in self._comms.values())

    def link(self, name: str, ranks: dict[int, int], rank_table: str) -> int:
        """Begin; the comm's id. Raises LLMException: LLM_PARAM_INVALID, LLM_LINK_FAILED."""
        own_id = self._engine.cluster_id
        require(own_id in ranks, f"cluster_rank_info {ranks} does not hold this cluster, {own_id}")
        with self._lock:
            require(len(self._comms) < MAX_COMMS, f"{len(self._comms)} comms exist, at most {MAX_COMMS} can")
            addresses = _find_members(ranks, rank_table)
            comm = Comm(self._next_id, name, own_id, ranks, addresses)
            self._listen(comm.own_address)
            self._next_id += 1
            self._comms[comm.comm_id] = comm
            for peer in comm.peers:
                self._owners[peer] = comm
                self._engine.preparing.add(peer)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "datadist-comm")
            self._pool.submit(self._prepare, comm)
        return comm.comm_id

    def _get(self, comm_id: int) -> Comm:
        with self._lock:
            comm = self._comms.get(comm_id)
        if comm is None:
            fail(LLMStatusCode.LLM_NOT_YET_LINK, f"comm_id {comm_id} is unknown")
        return comm

    def query(self, comm_id: int) -> RegisterMemStatus:
        """How far it is. Raises LLMException(LLM_NOT_YET_LINK)."""
        return self._get(comm_id).status

    def unlink(self, comm_id: int) -> None:
        """Stop the preparation or end the links. Raises LLMException: LLM_NOT_YET_LINK, LLM_UNLINK_FAILED."""
        comm = self._get(comm_id)
        comm.give_up("unlinked")
        settled = comm.wait_settled(_SETTLE_S)
        self._close_links(comm)
        with self._lock:
            known = self._comms.pop(comm_id, None)
            listener = self._release(comm.own_address) if known else None
        if listener is not None:
            listener.close()
        if not settled:
            fail(LLMStatusCode.LLM_UNLINK_FAILED, f"comm_id {comm_id}: its preparation does not end")

    def close(self) -> None:
        """End all, at finalize; nobody calls `link` any more."""
        with self._lock:
            comms = list(self._comms.values())
        for comm in comms:
            comm.give_up("finalized")
        for comm in comms:
            self.unlink(comm.comm_id)
        if self._pool is not None:
            self._pool.shutdown()

    # ---- the address of this rank

    def _listen(self, address: Address) -> None:
        """Holding the lock. Raises LLMException(LLM_LINK_FAILED)."""
        if address in self._listeners:
            listener, users = self._listeners[address]
            self._listeners[address] = listener, users + 1
            return
        guarded = bool(self._engine.options.secret) or ipaddress.IPv4Address(address[0]).is_loopback
        require(guarded, f"rank table: {address[0]} is not loopback, pd.host.secret is required")
        try:
            self._listeners[address] = self._engine.open_listener(address), 1
        except OSError as error:
            fail(LLMStatusCode.LLM_LINK_FAILED, f"cannot listen on {address[0]}:{address[1]}: {error}")

    def _release(self, address: Address) -> Listener | None:
        """Holding the lock; what the caller has to close without it."""
        listener, users = self._listeners[address]
        if users > 1:
            self._listeners[address] = listener, users - 1
            return None
        del self._listeners[address]
        return listener

    # ---- preparation, in a thread of the pool

    def _prepare(self, comm: Comm) -> None:
        status, reason = RegisterMemStatus.FAILED, f"not all members came within {self._total_s:g} s"
        begun = time.monotonic()
        try:
            for attempt in range(1, self._tries + 1):
                if self._try(comm, begun + self._total_s * attempt / self._tries):
                    status, reason = RegisterMemStatus.OK, ""
                    break
        except _Rejected as error:
            reason = str(error)
        except Exception as error:  # a defect here must end in FAILED, not in PREPARING for ever
            logger.exception("comm %s: preparation failed", comm.name)
            reason = str(error)
        if comm.is_given_up:
            status = RegisterMemStatus.FAILED
        if status == RegisterMemStatus.FAILED:
            comm.give_up(reason)
            logger.warning("comm %s (%d) failed: %s", comm.name, comm.comm_id, comm.reason)
            self._close_links(comm)
        else:
            self._release_peers(comm)
        comm.settle(status)

    def _try(self, comm: Comm, deadline: float) -> bool:
        for peer, address in comm.higher.items():
            while peer not in comm.links:
                if comm.is_given_up:
                    raise _Rejected(comm.reason)
                if time.monotonic() >= deadline:
                    return False
                if not self._meet(comm, peer, address, deadline):
                    comm.pause(_MEET_AGAIN_S)
        return comm.wait_links(deadline)

    def _meet(self, comm: Comm, peer: int, address: Address, deadline: float) -> bool:
        """Whether that member is linked now. Raises _Rejected."""
        sock: socket.socket | None = None
        try:
            sock = self._engine.dialler.connect(address, deadline, "comm")
            comm.watch(sock)
            send(sock, Join(name=comm.name, digest=comm.digest, source=self._engine.cluster_id, target=peer), deadline)
            verdict = receive(sock, Verdict, deadline)
            if verdict.word == REFUSED:
                raise _Rejected(f"cluster {peer} refused: {verdict.reason}")
            if verdict.word != GO:
                return False
            link = self._make_link(peer, address, deadline)
            if link is None:
                return False
            send(sock, Linked(), deadline)
            self._add_link(comm, peer, link)
            return True
        except NotAuthenticated as error:
            raise _Rejected(f"cluster {peer}: {error}") from error
        except (ChannelError, OSError) as error:
            logger.debug("comm %s: cluster %d is not there yet: %s", comm.name, peer, error)
            return False
        finally:
            comm.watch(None)
            if sock is not None:
                close(sock)

    def _make_link(self, peer: int, address: Address, deadline: float) -> Link | None:
        links = self._engine.links
        former = links.get(peer)
        if former is not None:  # a second `link` replaces what there was
            self._end(former, "linked anew")
        left_s = min(_ONE_LINK_S, max(0.001, deadline - time.monotonic()))
        status = self._engine.dialler.link(peer, address, int(left_s * 1000))
        if status == LLMStatusCode.LLM_PARAM_INVALID:
            raise _Rejected(f"cluster {peer} refused the link: {status}")
        return links.get(peer) if status == LLMStatusCode.LLM_SUCCESS else None

    # ---- joins, in a connection's thread

    def _serve_join(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + self._total_s
        join = receive(sock, Join, deadline)
        comm = self._find_waiting(join.name)
        if comm is None:
            send(sock, Verdict(word=WAIT), deadline)
            return
        reason = self._refuse(comm, join)
        if reason:
            send(sock, Verdict(word=REFUSED, reason=reason), deadline)
            comm.give_up(f"cluster {join.source}: {reason}")
            return
        send(sock, Verdict(word=GO), deadline)
        receive(sock, Linked, deadline)
        link = self._engine.links.get(join.source)
        if link is not None:
            self._add_link(comm, join.source, link)

    def _refuse(self, comm: Comm, join: Join) -> str:
        if join.digest != comm.digest:
            return f"comm_name {comm.name!r}: cluster_rank_info or rank table differ"
        if join.target != self._engine.cluster_id or join.source not in comm.lower:
            return f"cluster {join.source} looked for cluster {join.target}, this is {self._engine.cluster_id}"
        return ""

    def _find_waiting(self, name: str) -> Comm | None:
        with self._lock:
            waiting = [comm for comm in self._comms.values() if comm.name == name and not comm.is_settled]
        return waiting[-1] if waiting else None

    # ---- links of a comm

    def _release_peers(self, comm: Comm, forget: Callable[[int], object] | None = None) -> None:
        with self._lock:
            for peer in comm.peers:
                if self._owners.get(peer) is comm:
                    self._engine.preparing.discard(peer)
                    if forget is not None:
                        forget(peer)

    def _add_link(self, comm: Comm, peer: int, link: Link) -> None:
        if not comm.add_link(peer, link):
            self._end(link, "its comm has been given up")

    def _end(self, link: Link, reason: str) -> None:
        if self._engine.links.remove(link):
            link.close(self._engine.options.sync_timeout_ms / 1000, reason)

    def _close_links(self, comm: Comm) -> None:
        """After give_up: those that no later comm has replaced."""
        with comm.changed:
            made = list(comm.links.values())
        for link in made:
            self._end(link, "unlinked")
        self._release_peers(comm, self._owners.pop)


def _find_members(ranks: dict[int, int], rank_table: str) -> dict[int, Address]:
    """The addresses of the table, of members and others. Raises LLMException(LLM_LINK_FAILED)."""
    try:
        addresses = parse_rank_table(rank_table)
    except BadRankTable as error:
        fail(LLMStatusCode.LLM_LINK_FAILED, f"rank table: {error}")
    for cluster_id, rank in ranks.items():
        if rank not in addresses:
            fail(
                LLMStatusCode.LLM_LINK_FAILED,
                f"rank table: cluster {cluster_id} has rank {rank}, the table has {sorted(addresses)}",
            )
    return addresses
