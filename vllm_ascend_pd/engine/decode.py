# SPDX-License-Identifier: Apache-2.0
"""The decode side of the connector's scheduler half: admits requests at once, pairs them with handoffs, plans pulls.

Engine thread, except `on_deliver`, `on_compute_locally`, `on_connect` (control thread) and peers callbacks: those
only append to the inbox and wake the engine.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.control.server import Reply
from vllm_ascend_pd.engine.carried import not_carried
from vllm_ascend_pd.engine.stats import STAGED_STAGES, StatsRecorder
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.handoff import from_kv_transfer_params, prompt_digest, verify_handoff
from vllm_ascend_pd.plan.blocks import PlanError, plan_pulls
from vllm_ascend_pd.plan.layout import CacheGroup, layout_fingerprint
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.loads import Finished, Load, LoadState, LoadTable, RankResult, check_coverage
from vllm_ascend_pd.transfer.peers import Peer, PeerTable
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask
from vllm_ascend_pd.wire import Ack, ComputeLocally, ConnectPeer, DeliverHandoff, Handoff, LoadResult

logger = logging.getLogger(__name__)

# The API server's deadline ends a wait; this much later the engine does it alone (the API server has died).
DEADLINE_GRACE_S = 10.0
# A handoff may come before its request has reached this thread.
EARLY_HANDOFF_S = 10.0
MAX_ENDED_IDS = 4096
# An engine that only waits for handoffs takes a step this often: workers report their health with steps.
REST_S = 10.0


@dataclass
class _Offer:
    request_id: str
    handoff: Handoff
    reply: Callable[[LoadResult], object] | None
    came: float
    is_checked: bool = False  # an API server of ours compared the prompt: hashing it takes a step too long
    refused: str = ""


class DecodeHalf:
    """Requests that wait for remote KV, and the tasks for the workers."""

    def __init__(
        self,
        config: PDConfig,
        secret: Secret,
        groups: Sequence[CacheGroup],
        num_ranks: int,
        peers: PeerTable,
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._secret = secret
        self._block_sizes = [group.block_size for group in groups]
        self._layout = layout_fingerprint(groups)
        self._stats = stats
        self._clock = clock
        self.peers = peers
        self.loads = LoadTable(num_ranks, self._give_back, clock)
        self.wake: Callable[[], None] = lambda: None
        self._inbox: deque[_Offer | ComputeLocally | DropPeer] = deque()
        self._early: dict[str, _Offer] = {}
        self._early_local: OrderedDict[str, str] = OrderedDict()  # request id -> reason
        self._requests: dict[str, Any] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._drops: list[DropPeer] = []
        self._max_tokens_of: dict[str, int] = {}  # inline handoffs: they may cover less than the prompt

    # ---------------------------------------------------------------- scheduler hooks (engine thread)

    def new_request(self, request: Any) -> None:
        """A request has reached the scheduler."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        early = self._early.pop(request.request_id, None)
        local_reason = self._early_local.pop(request.request_id, None)
        reason = not_carried(request)
        if reason is not None:
            logger.warning(
                "request_id=%s prefills here: %s is not handed over by this release", request.request_id, reason
            )
            self._stats.fail(reason)
            self._forget(request.request_id)
            if early is not None:
                self._refuse_gone(early)
            return
        watched = bool(params.get("pd_wait"))
        self._requests[request.request_id] = request
        self.loads.expect(request.request_id, self._clock() + self._deadline_s(params), watched)
        if local_reason is not None:
            self.loads.compute_locally(request.request_id, local_reason)
        if early is not None:
            self._inbox.append(early)
        elif not watched:
            self._take_inline_handoff(request, params)

    def external_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that will come beyond `num_computed_tokens`, asynchronously. No side effect."""
        load = self.loads.get(request.request_id)
        if load is None or load.state is not LoadState.EXPECTED:
            return 0, False
        end = min(request.num_prompt_tokens - 1, self._max_tokens_of.get(request.request_id, 1 << 62))
        count = max(0, end - num_computed_tokens)
        return count, count > 0

    def blocks_allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """The scheduler admitted the request; `num_external` as `external_tokens` said, or 0."""
        load = self.loads.get(request.request_id)
        if load is None or load.state is not LoadState.EXPECTED:
            return
        end = min(request.num_prompt_tokens - 1, self._max_tokens_of.get(request.request_id, 1 << 62))
        self.loads.admit(request.request_id, block_ids, end - num_external, end)

    def request_finished(self, request_id: str) -> None:
        """The scheduler finished or aborted it."""
        self.loads.request_ended(request_id)
        self._requests.pop(request_id, None)
        self._max_tokens_of.pop(request_id, None)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """What comes for this request from now on comes too late."""
        self._ended[request_id] = None
        while len(self._ended) > MAX_ENDED_IDS:
            self._ended.popitem(last=False)

    def take_tasks(self) -> list[PullTask | DropPeer]:
        """What the workers have to do as of this step."""
        self.drain()
        tasks: list[PullTask | DropPeer] = list(self._drops)
        self._drops.clear()
        for load in self.loads.take_to_start():
            task = self._plan(load)
            if task is not None:
                tasks.append(task)
        return tasks

    def step_ended(self, results: Sequence[RankResult]) -> list[Finished]:
        """Take the workers' answers; returns the requests that the scheduler may go on with."""
        self.drain()
        for result in results:
            load = self.loads.get(result.request_id)
            try:
                self._record(result, load, self.loads.rank_answered(result))
            except Exception:  # on the engine's thread: at most this request is held up
                logger.exception("request_id=%s: an answer of rank %d was lost", result.request_id, result.rank)
        for request_id in self.loads.expire_due(DEADLINE_GRACE_S):
            logger.warning("request_id=%s: no handoff within its deadline", request_id)
            self._stats.fail("deadline")
        return self.loads.take_finished()

    def drain(self) -> None:
        """Take in what other threads left."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, DropPeer):
                self._drops.append(item)
            elif isinstance(item, ComputeLocally):
                self._take_compute_locally(item)
            else:
                try:
                    self._take_offer(item)
                except Exception as error:  # on the engine's thread: one request's handoff must not end all
                    logger.exception("request_id=%s handoff not used", item.request_id)
                    self._refuse(item, f"internal: {type(error).__name__}: {error}")
        now = self._clock()
        for request_id in [i for i, offer in self._early.items() if now - offer.came > EARLY_HANDOFF_S]:
            self._refuse_gone(self._early.pop(request_id))

    def rest_s(self, num_requests: int) -> float:
        """How long the engine may sleep until it is woken, in seconds; 0 unless its `num_requests` only wait."""
        deadline = None if self._inbox or self._drops or self._early else self.loads.next_deadline(num_requests)
        if deadline is None:
            return 0.0
        return min(REST_S, max(0.0, deadline + DEADLINE_GRACE_S - self._clock()))

    # ---------------------------------------------------------------- other threads

    def on_deliver(self, message: DeliverHandoff, reply: Reply) -> None:
        """An API server brings the handoff that it asked for (control thread)."""
        self._offer(message.request_id, message.handoff, reply.send)

    def on_compute_locally(self, message: ComputeLocally, reply: Reply) -> None:
        """An API server gave up on remote KV (control thread)."""
        self._inbox.append(message)
        reply.send(Ack())
        self.wake()

    def on_connect(self, message: ConnectPeer, reply: Reply) -> None:
        """Handshake with a prefill instance (control thread)."""
        self.peers.connect(message.host, message.port, reply.send)

    def peer_replaced(self, peer: Peer) -> None:
        """A prefill engine came back with a new epoch (peers thread)."""
        self._inbox.append(DropPeer(tuple(rank.cluster_id for rank in peer.ranks)))
        self.wake()

    def _offer(self, request_id: str, handoff: Handoff, reply: Callable[[LoadResult], object] | None) -> None:
        offer = _Offer(request_id, handoff, reply, self._clock(), is_checked=reply is not None)
        try:
            verify_handoff(handoff, self._secret)
        except PDError as error:
            offer.refused = f"signature: {error}"
            self._inbox.append(offer)
            self.wake()
            return

        def resolved(_: Peer | None, reason: str) -> None:
            offer.refused = reason
            self._inbox.append(offer)
            self.wake()

        self.peers.resolve(handoff, resolved)

    # ---------------------------------------------------------------- engine thread

    def _take_inline_handoff(self, request: Any, params: dict[str, Any]) -> None:
        """Two-phase protocol without an API server of ours that watches (offline use)."""
        try:
            handoff = from_kv_transfer_params(params)
            if handoff is None:
                raise PlanError("kv_transfer_params has no pd_handoff; was the prefill served by this fork?")
            verify_handoff(handoff, self._secret)
        except Exception as error:  # whatever a client wrote: this runs on the engine's thread
            logger.warning("request_id=%s: %s", request.request_id, error)
            self._stats.fail("handoff")
            self.loads.compute_locally(request.request_id, f"handoff: {error}")
            return
        self._max_tokens_of[request.request_id] = handoff.num_tokens
        self._offer(request.request_id, handoff, None)

    def _take_compute_locally(self, message: ComputeLocally) -> None:
        """May come before its request has: the ask failed at once."""
        if message.request_id in self._requests:
            self.loads.compute_locally(message.request_id, message.reason)
        elif message.request_id not in self._ended:
            self._early_local[message.request_id] = message.reason
            while len(self._early_local) > MAX_ENDED_IDS:
                self._early_local.popitem(last=False)

    def _take_offer(self, offer: _Offer) -> None:
        request = self._requests.get(offer.request_id)
        holder = self.loads.holder_of(offer.handoff.transfer_id)
        if offer.refused:
            self._refuse(offer, offer.refused)
        elif holder == offer.request_id:  # asked again: joins the load, or gets the same answer
            self.loads.offer(offer.request_id, offer.handoff, offer.reply)
        elif holder is not None:  # giving back would end the other request's lease
            self._refuse(offer, "duplicate: another request loads, or has loaded, from this handoff")
        elif request is not None:
            problem = self._problem(request, offer)
            if problem:
                self._give_back(offer.handoff, False)
                self._refuse(offer, problem)
            else:
                self.loads.offer(offer.request_id, offer.handoff, offer.reply)
        elif offer.request_id in self._ended:
            self._refuse_gone(offer)
        else:
            before = self._early.pop(offer.request_id, None)
            if before is not None and before.handoff.transfer_id != offer.handoff.transfer_id:
                self._refuse_gone(before)
            self._early[offer.request_id] = offer

    def _refuse(self, offer: _Offer, problem: str) -> None:
        logger.warning("request_id=%s handoff not used: %s", offer.request_id, problem)
        self._stats.fail(problem)
        if offer.reply is not None:
            offer.reply(LoadResult(outcome="failed", reason=problem))
        else:
            self.loads.compute_locally(offer.request_id, problem)

    def _problem(self, request: Any, offer: _Offer) -> str:
        handoff = offer.handoff
        if handoff.layout != self._layout:
            return f"layout: {handoff.layout} in the handoff, {self._layout} here"
        prompt = request.prompt_token_ids or []
        if not offer.is_checked and prompt_digest(prompt[: handoff.num_tokens]) != handoff.prompt_digest:
            return "prompt: the handoff was made for another prompt"
        return ""

    def _plan(self, load: Load) -> PullTask | None:
        handoff = load.handoff
        assert handoff is not None
        started = self._clock()
        try:
            peer = self.peers.known(handoff)
            if peer is None:
                raise PlanError(f"engine {handoff.engine_id} of this handoff has been replaced")
            check_coverage(handoff, load.end_token)
            pulls = plan_pulls(
                self._block_sizes, handoff.block_ids, load.dst_block_ids, load.start_token, load.end_token
            )
        except Exception as error:
            if not isinstance(error, PlanError):
                logger.exception("request_id=%s cannot be planned", load.request_id)
            self._stats.fail("plan")
            self._give_back(handoff, False)
            self.loads.reject(load.request_id, f"plan: {error}")
            return None
        now = self._clock()
        self._stats.stage("wait", now - load.waiting_since)
        self._stats.stage("plan", now - started)
        return PullTask(
            load.request_id,
            handoff.transfer_id,
            handoff.lease_id,
            handoff.host,
            handoff.port,
            peer.ranks,
            pulls,
            max(0.1, load.deadline - now),
            self._config.epoch,
        )

    def _record(self, result: RankResult, load: Load | None, outcome: str | None) -> None:
        """Bytes and seconds by rank, transfers and failures once for all ranks."""
        if result.ok:
            self._stats.count("bytes", result.num_bytes)
            self._stats.count("pieces", result.num_pieces)
            self._stats.count("calls", result.num_calls)
            self._stats.count("staged", int(result.staged))
            for stage, seconds in result.seconds.items():
                if result.staged or stage not in STAGED_STAGES:
                    self._stats.stage(stage, seconds)
        else:
            logger.warning(
                "request_id=%s transfer failed on rank %d: %s", result.request_id, result.rank, result.reason
            )
        if load is None or outcome is None:
            return
        if outcome:
            self._stats.fail(outcome)
        else:
            self._stats.count("transfers")
            self._stats.count("tokens", load.num_tokens)

    def _refuse_gone(self, offer: _Offer) -> None:
        if not offer.refused and self.loads.holder_of(offer.handoff.transfer_id) in (None, offer.request_id):
            self._give_back(offer.handoff, False)
        if offer.reply is not None:
            offer.reply(LoadResult(outcome="gone", reason="the request has ended"))

    def _deadline_s(self, params: dict[str, Any]) -> float:
        """Ours in API servers; a rejected request comes with whatever its client wrote."""
        asked = params.get("pd_deadline_ms")
        if isinstance(asked, int) and 0 < asked < self._config.deadline_ms:
            return asked / 1000
        return self._config.deadline_s

    def _give_back(self, handoff: Handoff, moved: bool) -> None:
        if moved:
            self._stats.count("transfers_empty")
        self.peers.give_back(handoff, moved)
