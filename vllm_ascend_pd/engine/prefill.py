# SPDX-License-Identifier: Apache-2.0
"""The prefill side of the connector's scheduler half: leases on finished prompts.

A lease holds its own reference on the blocks (`BlockPool.touch`), so that the request itself ends at once and an
idle engine sleeps: upstream's "free later" keeps the engine loop spinning for as long as a lease lives.
The control thread answers renew, release and cancel from the lease table; only the engine thread touches the pool.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.control.server import Reply
from vllm_ascend_pd.engine.carried import not_carried
from vllm_ascend_pd.engine.stats import StatsRecorder
from vllm_ascend_pd.handoff import ask_bytes, prompt_digest, sign_handoff, to_kv_transfer_params
from vllm_ascend_pd.handshake import compare
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.lease import LeaseTable
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    Ack,
    CancelTransfer,
    Handoff,
    Hello,
    HelloReply,
    LeaseRelease,
    LeaseRenew,
    RankAddress,
    Refused,
)

logger = logging.getLogger(__name__)

# Leases that nobody signed for (external routers) may hold this share of the KV blocks.
UNSIGNED_SHARE = 0.5
MAX_SEEN_PEERS = 256
# Request statuses with which a one-token prefill ends well.
_GOOD_ENDS = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class PrefillHalf:
    """Grants leases (engine thread) and answers decode engines (control thread)."""

    def __init__(
        self,
        config: PDConfig,
        secret: Secret,
        record: dict[str, Any],
        layout: str,
        num_ranks: int,
        leases: LeaseTable,
        stats: StatsRecorder,
    ) -> None:
        self._config = config
        self._secret = secret
        self._record = record
        self._layout = layout
        self._num_ranks = num_ranks
        self._stats = stats
        self._pool: Any = None
        self.leases = leases
        self.ranks: tuple[RankAddress, ...] = ()
        self.peer_port = 0
        self.wake: Callable[[], None] = lambda: None
        self.seen_peers: dict[str, str] = {}  # decode engine id -> epoch, for /pd/status

    # ---------------------------------------------------------------- engine thread

    def bind_pool(self, pool: Any) -> None:
        """The scheduler's block pool."""
        self._pool = pool
        self.leases.max_unsigned_blocks = int(pool.num_gpu_blocks * UNSIGNED_SHARE)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The handoff of a finished `do_remote_decode` request, as `kv_transfer_params`; None without a lease."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status.name not in _GOOD_ENDS:
            return None
        try:
            return self._lease(request, params, block_ids)
        except Exception:  # on the engine's thread: one answer goes without a handoff, the engine goes on
            logger.exception("request_id=%s gets no lease", request.request_id)
            self._stats.count("leases_denied")
            return None

    def _lease(self, request: Any, params: dict[str, Any], block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        reason = not_carried(request)
        if reason is not None:
            logger.warning("no lease for request %s: %s is not handed over by this release", request.request_id, reason)
            self._stats.count("leases_denied")
            return None
        transfer_id = str(params.get("pd_transfer_id") or "")
        digest = str(params.get("pd_prompt_digest") or "")
        signed = self._secret.verify(str(params.get("pd_ask") or ""), "ask", ask_bytes(transfer_id, digest))
        if not signed:  # what an unknown client calls its transfer, or its prompt, is not ours to use
            transfer_id = self._own_transfer_id(request.request_id)
            digest = prompt_digest(request.prompt_token_ids)
        return self._grant(request, block_ids, transfer_id, digest, signed)

    def _grant(
        self, request: Any, block_ids: Sequence[Sequence[int]], transfer_id: str, digest: str, signed: bool
    ) -> dict[str, Any] | None:
        held = [self._pool.blocks[i] for ids in block_ids for i in ids if i != 0]
        grant = self.leases.grant(
            transfer_id,
            tuple(tuple(ids) for ids in block_ids),
            num_ranks=None,
            signed=signed,
            payload=held,
            num_blocks=len(held),
        )
        if grant.lease is None:
            logger.warning("no lease for request %s: %s", request.request_id, grant.reason)
            self._stats.count("leases_denied")
            return None
        self._pool.touch(held)
        self._stats.count("leases_granted")
        handoff = sign_handoff(
            Handoff(
                transfer_id=transfer_id,
                lease_id=grant.lease.lease_id,
                engine_id=self._config.engine_id,
                epoch=self._config.epoch,
                host=self._config.advertise_host,
                port=self.peer_port,
                num_tokens=request.num_prompt_tokens,
                prompt_digest=digest,
                block_ids=tuple(tuple(ids) for ids in block_ids),
                layout=self._layout,
                lease_ms=self._config.lease_ms,
            ),
            self._secret,
        )
        return to_kv_transfer_params(handoff, request.request_id, self._num_ranks)

    def free_ended(self) -> None:
        """Return the blocks of leases that have ended to the pool."""
        for lease in self.leases.drain_ended():
            self._stats.count(f"leases_{lease.state.value}")
            self._pool.free_blocks(reversed(lease.payload))

    def _own_transfer_id(self, request_id: str) -> str:
        return f"{self._config.engine_id}/{self._config.epoch}/{request_id}/{secrets.token_hex(4)}"

    # ---------------------------------------------------------------- control thread

    def on_hello(self, message: Hello, reply: Reply) -> None:
        """Compare records; refuse by field name."""
        if message.wire_version != WIRE_VERSION:
            reply.send(_refuse("wire_version", WIRE_VERSION, message.wire_version))
            return
        if not self.ranks:
            return  # starting: the workers have not said where they listen and what; the decode side asks again
        differences = compare(self._record, message.record)
        if differences:
            first = differences[0]
            logger.warning(
                "decode engine %s refused: %s is %s here, %s there (%d fields differ)",
                message.engine_id,
                first.field,
                first.ours,
                first.theirs,
                len(differences),
            )
            reply.send(_refuse(first.field, first.ours, first.theirs))
            return
        self.seen_peers.pop(message.engine_id, None)
        self.seen_peers[message.engine_id] = message.epoch
        if len(self.seen_peers) > MAX_SEEN_PEERS:  # every restart of a decode engine is another one
            self.seen_peers.pop(next(iter(self.seen_peers)))
        reply.send(
            HelloReply(
                engine_id=self._config.engine_id,
                epoch=self._config.epoch,
                record=self._record,
                ranks=self.ranks,
            )
        )

    def on_renew(self, message: LeaseRenew, reply: Reply) -> None:
        """A reader is about to read."""
        reply.send(self.leases.renew(*_reading(message)))

    def on_release(self, message: LeaseRelease, reply: Reply) -> None:
        """A reader has read its last byte."""
        reply.send(self.leases.release(*_reading(message)))
        self.wake_if_ended()

    def on_cancel(self, message: CancelTransfer, reply: Reply) -> None:
        """The request is gone."""
        self.leases.cancel(message.transfer_id)
        reply.send(Ack())
        self.wake_if_ended()

    def tick(self) -> float | None:
        """Expire what is due; returns when the next one is."""
        self.leases.expire_due()
        self.wake_if_ended()
        return self.leases.next_deadline()

    def wake_if_ended(self) -> None:
        """An idle engine must return blocks of ended leases to the pool."""
        if self.leases.has_ended():
            self.wake()


def _reading(message: LeaseRenew | LeaseRelease) -> tuple[str, str, int, int, str]:
    return message.lease_id, message.transfer_id, message.rank, message.num_ranks, message.reader


def _refuse(field: str, ours: object, theirs: object) -> Refused:
    return Refused(
        code="handshake",
        message=f"{field} differs: {ours} on the prefill side, {theirs} on the decode side",
        field=field,
        ours=str(ours),
        theirs=str(theirs),
    )
