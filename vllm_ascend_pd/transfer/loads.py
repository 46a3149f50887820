# SPDX-License-Identifier: Apache-2.0
"""Every request of a decode engine that waits for remote KV: one `Load` each, one writer (the engine thread).

The control thread only appends to the inbox (`DecodeScheduler`); workers' results come back with step outputs.
A load that ends tells the scheduler exactly once (`take_finished`), whatever order abort, handoff and results
come in: that is what keeps blocks that a posted pull may still write out of the pool (invariants I1, I5, I8).
"""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.plan.blocks import PlanError
from vllm_ascend_pd.wire import Handoff, LoadResult

logger = logging.getLogger(__name__)

MAX_ANSWERS = 4096


class LoadState(enum.Enum):
    """Who may touch the request's blocks, and what comes next."""

    EXPECTED = "expected"  # in the scheduler's queue, no blocks yet
    ADMITTED = "admitted"  # blocks allocated and idle; waits for a handoff
    PULLING = "pulling"  # tasks are with the workers: the blocks stay until every rank has answered
    NOTHING = "nothing"  # this side has it all: the request runs, a handoff is only given back
    LOCAL = "local"  # prefilled here: a handoff is only given back
    ENDED = "ended"


_ALLOWED = {
    LoadState.EXPECTED: {LoadState.ADMITTED, LoadState.NOTHING, LoadState.LOCAL, LoadState.ENDED},
    LoadState.ADMITTED: {LoadState.PULLING, LoadState.LOCAL, LoadState.ENDED},
    LoadState.PULLING: {LoadState.ADMITTED, LoadState.LOCAL, LoadState.ENDED},
    LoadState.NOTHING: {LoadState.ENDED, LoadState.LOCAL},
    LoadState.LOCAL: {LoadState.ENDED},
    LoadState.ENDED: set(),
}


@dataclass(frozen=True)
class RankResult:
    """What one worker rank says of its part of one transfer; sent exactly once per task."""

    request_id: str
    transfer_id: str
    rank: int
    ok: bool  # every byte written, and the lease was ours until after the last one
    reason: str = ""
    num_bytes: int = 0
    num_pieces: int = 0
    num_calls: int = 0
    staged: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage


Reply = Callable[[LoadResult], object]


@dataclass
class Load:
    """One request's remote KV."""

    request_id: str
    deadline: float  # monotonic seconds
    watched: bool  # an API server decides about failures (else the policy of this engine does)
    state: LoadState = LoadState.EXPECTED
    handoff: Handoff | None = None
    reply: Reply | None = None
    start_token: int = 0
    end_token: int = 0
    dst_block_ids: tuple[tuple[int, ...], ...] = ()
    results: dict[int, RankResult] = field(default_factory=dict)
    waiting_since: float = 0.0
    local_reason: str = ""  # set while PULLING: compute locally once the ranks have answered
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the pull brings."""
        return self.end_token - self.start_token


@dataclass(frozen=True)
class Finished:
    """The scheduler may go on with this request: its blocks are quiet."""

    request_id: str
    ok: bool
    reason: str
    aborted: bool


class LoadTable:
    """All loads of one engine core. Engine thread only.

    Args:
        num_ranks: worker ranks that must answer for each transfer.
        give_back: called with a handoff that will not be used (or had nothing to move, `moved=False`).
    """

    def __init__(
        self,
        num_ranks: int,
        give_back: Callable[[Handoff, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = num_ranks
        self._give_back = give_back
        self._clock = clock
        self._loads: dict[str, Load] = {}
        self._finished: list[Finished] = []
        self._to_start: list[Load] = []
        # By transfer id, of those that have ended: the request that had the handoff, and what its asker was told.
        self._answers: OrderedDict[str, tuple[str, LoadResult]] = OrderedDict()

    # ---------------------------------------------------------------- queries

    def get(self, request_id: str) -> Load | None:
        """The load of a request that has not ended."""
        return self._loads.get(request_id)

    def holder_of(self, transfer_id: str) -> str | None:
        """The request that has, or has had, the handoff of this transfer: it serves one request, once."""
        for load in self._loads.values():
            if load.handoff is not None and load.handoff.transfer_id == transfer_id:
                return load.request_id
        return self._answers[transfer_id][0] if transfer_id in self._answers else None

    def counts(self) -> dict[str, int]:
        """Loads by state, for /pd/status. Any thread: counts a copy, as the engine thread goes on meanwhile."""
        counts = {state.value: 0 for state in LoadState if state is not LoadState.ENDED}
        for load in list(self._loads.values()):
            state = load.state
            if state is not LoadState.ENDED:
                counts[state.value] += 1
        return counts

    def next_deadline(self, num_requests: int) -> float | None:
        """The earliest deadline (monotonic seconds), when `num_requests` loads are all that there is and each has its
        blocks and waits for a handoff; None while anything else is to do."""
        loads = self._loads.values()
        if self._finished or not loads or len(loads) != num_requests:
            return None
        if any(load.state is not LoadState.ADMITTED for load in loads):
            return None
        return min(load.deadline for load in loads)

    def take_finished(self) -> list[Finished]:
        """Requests to report to the scheduler, each once."""
        finished, self._finished = self._finished, []
        return finished

    def take_to_start(self) -> list[Load]:
        """Loads that have blocks and a handoff since the last call; they are PULLING now."""
        loads, self._to_start = self._to_start, []
        return [load for load in loads if load.state is LoadState.PULLING]

    # ---------------------------------------------------------------- the request's side

    def expect(self, request_id: str, deadline: float, watched: bool) -> Load:
        """A request came that wants remote KV."""
        load = Load(request_id, deadline, watched, waiting_since=self._clock())
        self._loads[request_id] = load
        return load

    def admit(self, request_id: str, dst_block_ids: Sequence[Sequence[int]], start_token: int, end_token: int) -> None:
        """Its blocks are allocated; tokens `[start_token, end_token)` are to come. None to come: it just runs."""
        load = self._loads[request_id]
        if load.state is not LoadState.EXPECTED:
            return
        if start_token >= end_token:
            self._move(load, LoadState.NOTHING)
            if load.handoff is not None:
                self._finish_nothing(load)
            return
        load.dst_block_ids = tuple(tuple(ids) for ids in dst_block_ids)
        load.start_token, load.end_token = start_token, end_token
        self._move(load, LoadState.ADMITTED)
        self._start_if_ready(load)

    def request_ended(self, request_id: str) -> None:
        """The scheduler finished (or aborted) it. Blocks of a PULLING load stay until its ranks have answered."""
        load = self._loads.get(request_id)
        if load is None:
            return
        load.aborted = True
        self._unpost(load)
        if load.state is LoadState.PULLING:
            return
        was_admitted = load.state is LoadState.ADMITTED
        self._drop_handoff(load, "the request has ended")
        self._end(load)
        if was_admitted:  # the scheduler waits for our word before it frees blocks of such a request
            self._finished.append(Finished(request_id, False, "aborted", True))

    def compute_locally(self, request_id: str, reason: str) -> bool:
        """Stop waiting; prefill here. False when the request is not (or no longer) waiting."""
        load = self._loads.get(request_id)
        if load is None or load.state in (LoadState.LOCAL, LoadState.NOTHING):
            return False
        self._unpost(load)
        if load.state is LoadState.PULLING:
            load.local_reason = reason
            return True
        was_admitted = load.state is LoadState.ADMITTED
        self._drop_handoff(load, reason)
        self._move(load, LoadState.LOCAL)
        if was_admitted:
            self._finished.append(Finished(request_id, False, reason, False))
        return True

    # ---------------------------------------------------------------- the handoff's side

    def offer(self, request_id: str, handoff: Handoff, reply: Reply | None) -> None:
        """A checked handoff. Asking again about a transfer joins it, or repeats its answer."""
        load = self._loads.get(request_id)
        if handoff.transfer_id in self._answers:  # the answer was lost: the same one again
            if reply is not None:
                _tell(reply, self._answers[handoff.transfer_id][1])
            return
        if load is None:
            self._give_back(handoff, False)
            if reply is not None:
                _tell(reply, LoadResult(outcome="gone", reason="the request waits for nothing"))
            return
        if load.handoff is not None and load.handoff.transfer_id == handoff.transfer_id:
            load.reply = reply or load.reply  # the same question again: the latest asker gets the answer
            return
        if load.state is LoadState.LOCAL or load.state is LoadState.PULLING or load.aborted:
            self._give_back(handoff, False)
            if reply is not None:
                _tell(reply, LoadResult(outcome="gone", reason=f"the request is {load.state.value}"))
            return
        self._drop_handoff(load, "replaced by a newer attempt")
        load.handoff, load.reply = handoff, reply
        if load.state is LoadState.NOTHING:
            self._finish_nothing(load)
        else:
            self._start_if_ready(load)

    def reject(self, request_id: str, reason: str) -> None:
        """The current handoff cannot be used (bad plan, unknown peer)."""
        load = self._loads.get(request_id)
        if load is not None and load.handoff is not None and load.state is not LoadState.LOCAL:
            self._fail(load, reason)

    def rank_answered(self, result: RankResult) -> str | None:
        """One rank's part is over. A repeat, or an answer to an older attempt, changes nothing.

        Returns None while ranks are missing; after the last one why the load failed, or "" when its bytes are used.
        """
        load = self._loads.get(result.request_id)
        if load is None or load.state is not LoadState.PULLING or load.handoff is None:
            return None
        if load.handoff.transfer_id != result.transfer_id:
            return None
        load.results.setdefault(result.rank, result)
        if len(load.results) < self._num_ranks:
            return None
        bad = [r for r in load.results.values() if not r.ok]
        reason = bad[0].reason or "failed" if bad else "aborted" if load.aborted else load.local_reason
        if bad or (reason and not load.aborted):
            self._fail(load, reason)
        else:
            self._succeed(load)
        return reason

    def expire_due(self, grace_s: float) -> list[str]:
        """Loads whose deadline has passed by `grace_s` without a handoff end here (the API server's own deadline
        comes first; this is for one that has died). Returns their request ids."""
        now = self._clock()
        due = [
            load.request_id
            for load in self._loads.values()
            if now > load.deadline + grace_s and load.state in (LoadState.EXPECTED, LoadState.ADMITTED)
        ]
        for request_id in due:
            self.compute_locally(request_id, "deadline")
        return due

    # ---------------------------------------------------------------- transitions

    def _move(self, load: Load, to: LoadState) -> None:
        if to not in _ALLOWED[load.state]:
            raise AssertionError(f"load {load.request_id}: {load.state.value} -> {to.value}")
        load.state = to

    def _start_if_ready(self, load: Load) -> None:
        if load.state is LoadState.ADMITTED and load.handoff is not None:
            load.results = {}
            self._move(load, LoadState.PULLING)
            self._to_start.append(load)

    def _unpost(self, load: Load) -> None:
        """Its tasks have not been taken: no worker may write, and nobody has to be waited for."""
        if any(other is load for other in self._to_start):
            self._to_start = [other for other in self._to_start if other is not load]
            self._move(load, LoadState.ADMITTED)

    def _finish_nothing(self, load: Load) -> None:
        assert load.handoff is not None
        self._give_back(load.handoff, True)
        self._answer(load, LoadResult(outcome="loaded"))

    def _succeed(self, load: Load) -> None:
        results = load.results.values()
        self._answer(
            load,
            LoadResult(
                outcome="gone" if load.aborted else "loaded",
                num_tokens=load.num_tokens,
                num_bytes=sum(r.num_bytes for r in results),
                pull_ms=max(r.seconds.get("pull", 0.0) for r in results) * 1000,
            ),
        )
        self._end(load)
        self._finished.append(Finished(load.request_id, not load.aborted, "", load.aborted))

    def _fail(self, load: Load, reason: str) -> None:
        """This attempt is over and no byte of it is used. The API server may bring another handoff."""
        self._answer(load, LoadResult(outcome="gone" if load.aborted else "failed", reason=reason))
        if load.aborted:
            self._end(load)
            self._finished.append(Finished(load.request_id, False, reason, True))
        elif load.watched and not load.local_reason:
            if load.state is LoadState.PULLING:
                self._move(load, LoadState.ADMITTED)
        else:
            had_blocks = load.state in (LoadState.PULLING, LoadState.ADMITTED)
            self._move(load, LoadState.LOCAL)
            if had_blocks:
                self._finished.append(Finished(load.request_id, False, load.local_reason or reason, False))

    def _drop_handoff(self, load: Load, reason: str) -> None:
        if load.handoff is not None:
            self._give_back(load.handoff, False)
            self._answer(load, LoadResult(outcome="gone", reason=reason))

    def _answer(self, load: Load, result: LoadResult) -> None:
        if load.handoff is not None:
            self._answers[load.handoff.transfer_id] = load.request_id, result
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        load.handoff = None
        reply, load.reply = load.reply, None
        if reply is not None:
            _tell(reply, result)

    def _end(self, load: Load) -> None:
        self._move(load, LoadState.ENDED)
        self._loads.pop(load.request_id, None)


def _tell(reply: Reply, result: LoadResult) -> None:
    """An answer that cannot be sent must not stop a transition half way: its blocks would be held for ever."""
    try:
        reply(result)
    except Exception:
        logger.exception("an answer to an API server was not sent")


def check_coverage(handoff: Handoff, end_token: int) -> None:
    """Raises PlanError when the handoff holds fewer tokens than the request needs."""
    if handoff.num_tokens < end_token:
        raise PlanError(f"the handoff covers {handoff.num_tokens} tokens, {end_token} are needed")
