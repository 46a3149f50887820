# SPDX-License-Identifier: Apache-2.0
"""A decode engine core's view of its prefill engines: the handshake, done before the first byte, per epoch.

One thread ("pd-peers") does all network calls, so that neither the engine thread nor the control thread waits.
Handoffs pass through here: a handoff of an engine whose record agreed goes on at once, another one waits for
the handshake, one whose record disagrees is refused by field name.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.handshake import compare
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    CancelTransfer,
    ConnectResult,
    Handoff,
    Hello,
    HelloReply,
    LeaseRelease,
    RankAddress,
    Refused,
)

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
GIVE_BACK_TIMEOUT_S = 5.0
GIVE_BACK_ATTEMPTS = 3
IDLE_BEAT_S = 0.5

Address = tuple[str, int]


@dataclass(frozen=True)
class Peer:
    """One prefill engine whose record agreed with ours."""

    engine_id: str
    epoch: str
    host: str
    port: int
    ranks: tuple[RankAddress, ...]


@dataclass(frozen=True)
class _Job:
    run: Callable[[], object]
    what: str


class PeerTable:
    """Handshakes, and everything else that a decode engine core sends to prefill engines.

    Args:
        record: this side's handshake record.
        on_epoch_change: called (peers thread) with the ranks of an engine that has been replaced.
    """

    def __init__(
        self,
        engine_id: str,
        epoch: str,
        record: dict[str, Any],
        secret: Secret,
        num_ranks: int,
        on_epoch_change: Callable[[Peer], None],
    ) -> None:
        self._hello = Hello(wire_version=WIRE_VERSION, engine_id=engine_id, epoch=epoch, record=record)
        self._record = record
        self._secret = secret
        self._num_ranks = num_ranks
        self._on_epoch_change = on_epoch_change
        self._lock = threading.Lock()
        self._peers: dict[Address, Peer] = {}
        self._clients: dict[Address, ControlClient] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pd-peers", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def peers(self) -> list[Peer]:
        """Those that agreed."""
        with self._lock:
            return list(self._peers.values())

    def known(self, handoff: Handoff) -> Peer | None:
        """The peer that made this handoff, if its handshake is done."""
        with self._lock:
            peer = self._peers.get((handoff.host, handoff.port))
        if peer is None or (peer.engine_id, peer.epoch) != (handoff.engine_id, handoff.epoch):
            return None
        return peer

    def connect(self, host: str, port: int, done: Callable[[ConnectResult], object]) -> None:
        """Do the handshake (again) in the background and tell the outcome."""
        self._jobs.put(_Job(lambda: done(self._shake((host, port))), f"handshake with {host}:{port}"))

    def resolve(self, handoff: Handoff, done: Callable[[Peer | None, str], None]) -> None:
        """Find the peer of a handoff, by a handshake if need be; `done(peer, reason)`.

        The caller has checked the signature: only addresses that it covers are dialled (I16).
        """
        peer = self.known(handoff)
        if peer is not None:
            done(peer, "")
            return

        def shake_and_tell() -> None:
            found, reason = self.known(handoff), ""
            if found is None:
                result = self._shake((handoff.host, handoff.port))
                found = self.known(handoff)
                reason = result.detail or (result.refused.message if result.refused else "")
                reason = reason or f"engine {handoff.engine_id} of this handoff has been replaced"
            done(found, "" if found else f"peer: {reason}")

        self._jobs.put(_Job(shake_and_tell, f"peer of {handoff.transfer_id}"))

    def give_back(self, handoff: Handoff, moved: bool) -> None:
        """End a lease that will not be read: released by all ranks when there was nothing to move, else cancelled."""
        self._jobs.put(_Job(lambda: self._give_back(handoff, moved), f"release of {handoff.lease_id}"))

    def close(self) -> None:
        """Finish queued jobs, then join."""
        self._jobs.put(None)
        self._thread.join(timeout=10)
        for client in self._clients.values():
            client.close()

    # ---------------------------------------------------------------- peers thread

    def _run(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            try:
                job = self._jobs.get(timeout=IDLE_BEAT_S)
            except queue.Empty:
                continue
            if job is None:
                return
            try:
                job.run()
            except Exception:
                logger.exception("%s failed", job.what)

    def _client(self, address: Address) -> ControlClient:
        if address not in self._clients:
            host, port = address
            literal = f"[{host}]" if ":" in host else host
            self._clients[address] = ControlClient(f"tcp://{literal}:{port}", self._secret)
        return self._clients[address]

    def _shake(self, address: Address) -> ConnectResult:
        try:
            answer = self._client(address).request(self._hello, HELLO_TIMEOUT_S, 2)
        except PDError as error:
            return ConnectResult(outcome="unreachable", detail=str(error))
        if isinstance(answer, Refused):
            return ConnectResult(outcome="refused", refused=answer)
        if not isinstance(answer, HelloReply):
            return ConnectResult(outcome="unreachable", detail=f"unexpected answer {type(answer).__name__}")
        differences = compare(self._record, answer.record)
        if differences:
            first = differences[0]
            refused = Refused(
                code="handshake",
                message=f"{first.field} differs: {first.ours} here, {first.theirs} on the prefill side",
                field=first.field,
                ours=str(first.ours),
                theirs=str(first.theirs),
            )
            return ConnectResult(outcome="refused", refused=refused)
        peer = Peer(answer.engine_id, answer.epoch, *address, answer.ranks)
        with self._lock:
            old = self._peers.get(address)
            self._peers[address] = peer
        if old is not None and (old.engine_id, old.epoch) != (peer.engine_id, peer.epoch):
            self._on_epoch_change(old)
        logger.info("prefill engine %s (epoch %s) at %s:%d agreed", peer.engine_id, peer.epoch, *address)
        return ConnectResult(outcome="linked", engine_id=peer.engine_id, epoch=peer.epoch)

    def _give_back(self, handoff: Handoff, moved: bool) -> None:
        client = self._client((handoff.host, handoff.port))
        try:
            if not moved:
                client.request(CancelTransfer(transfer_id=handoff.transfer_id), GIVE_BACK_TIMEOUT_S, GIVE_BACK_ATTEMPTS)
                return
            for rank in range(self._num_ranks):
                message = LeaseRelease(
                    lease_id=handoff.lease_id,
                    transfer_id=handoff.transfer_id,
                    rank=rank,
                    num_ranks=self._num_ranks,
                    reader=self._hello.epoch,
                )
                client.request(message, GIVE_BACK_TIMEOUT_S, GIVE_BACK_ATTEMPTS)
        except PDError as error:
            logger.warning("lease %s was not given back (it will expire): %s", handoff.lease_id, error)
