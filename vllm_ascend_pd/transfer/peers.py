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
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.errors import PDError, PDUnreachableError
from vllm_ascend_pd.handshake import compare
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    Answer,
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
MAX_PEERS = 64  # a prefill engine that comes back elsewhere is another one; one that was forgotten is asked again
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
        on_epoch_change: called (peers thread) with an engine that has been replaced, or was forgotten.
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
        self._num_ranks = num_ranks
        self._on_epoch_change = on_epoch_change
        self._lock = threading.Lock()
        self._peers: OrderedDict[Address, Peer] = OrderedDict()  # the least recently used first
        self._clients = ClientTable(secret)
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
            self._peers.move_to_end((handoff.host, handoff.port))
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
        asked = time.monotonic()
        self._jobs.put(_Job(lambda: self._give_back(handoff, moved, asked), f"release of {handoff.lease_id}"))

    def close(self) -> None:
        """Finish queued jobs, then join."""
        self._jobs.put(None)
        self._thread.join(timeout=10)
        self._clients.close()

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

    def _shake(self, address: Address) -> ConnectResult:
        try:
            return self._compare(address, self._clients.get(*address).request(self._hello, HELLO_TIMEOUT_S, 2))
        except Exception as error:  # whoever waits for this has to hear of it
            if not isinstance(error, PDError):
                logger.exception("handshake with %s:%d", *address)
            return ConnectResult(outcome="unreachable", detail=str(error))

    def _compare(self, address: Address, answer: Answer) -> ConnectResult:
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
            gone = [self._peers.pop(address)] if address in self._peers else []
            self._peers[address] = peer
            if len(self._peers) > MAX_PEERS:
                gone.append(self._peers.popitem(last=False)[1])
        for old in gone:
            if (old.engine_id, old.epoch) != (peer.engine_id, peer.epoch):
                self._on_epoch_change(old)
        logger.info("prefill engine %s (epoch %s) at %s:%d agreed", peer.engine_id, peer.epoch, *address)
        return ConnectResult(outcome="linked", engine_id=peer.engine_id, epoch=peer.epoch)

    def _give_back(self, handoff: Handoff, moved: bool, asked: float) -> None:
        address = handoff.host, handoff.port
        if self._clients.was_silent_since(*address, asked):
            logger.debug("lease %s is left to expire: %s:%d is silent", handoff.lease_id, *address)
            return
        client = self._clients.get(*address)
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
        except PDUnreachableError as error:
            self._clients.note_silence(*address)
            logger.warning("lease %s was not given back (it will expire): %s", handoff.lease_id, error)
