# SPDX-License-Identifier: Apache-2.0
"""A waiting request is reported once, after its last rank, whatever order abort, handoff and answers come in."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_ascend_pd.transfer.loads import LoadState, LoadTable, RankResult
from vllm_ascend_pd.wire import Handoff


def handoff(name="t1", num_tokens=100):
    return Handoff(
        transfer_id=name, lease_id=f"lease-{name}", engine_id="p", epoch="e", host="127.0.0.1", port=1,
        num_tokens=num_tokens, prompt_digest="", block_ids=((1, 2),), layout="", lease_ms=1000,
    )  # fmt: skip


class Table:
    """A LoadTable with its clock, what it gave back, and the answers."""

    def __init__(self, num_ranks=2):
        self.now = 0.0
        self.given_back = []
        self.answers = []
        self.table = LoadTable(
            num_ranks, lambda h, moved: self.given_back.append((h.transfer_id, moved)), lambda: self.now
        )

    def expect(self, request="r", watched=True):
        self.table.expect(request, self.now + 10, watched)

    def admit(self, request="r", start=0, end=40):
        self.table.admit(request, [[7, 8]], start, end)

    def offer(self, name="t1", request="r"):
        self.table.offer(request, handoff(name), lambda a: self.answers.append((name, a.outcome, a.reason)))

    def answer(self, rank, ok=True, name="t1", request="r", reason="broken"):
        self.table.rank_answered(RankResult(request, name, rank, ok, "" if ok else reason, 10))

    def finished(self):
        return [(f.request_id, f.ok, f.aborted) for f in self.table.take_finished()]


@pytest.fixture
def t():
    return Table()


def test_a_request_is_ready_only_after_every_rank_answered(t):
    t.expect(), t.admit(), t.offer()
    assert [load.request_id for load in t.table.take_to_start()] == ["r"]
    t.answer(0)
    assert t.finished() == []
    t.answer(0)  # a repeat of the same rank is not the other rank
    assert t.finished() == []
    t.answer(1)
    assert t.finished() == [("r", True, False)]
    assert t.answers == [("t1", "loaded", "")]
    assert t.table.get("r") is None


def test_the_handoff_may_come_before_the_blocks(t):
    t.expect(), t.offer()
    assert t.table.take_to_start() == []
    t.admit()
    assert len(t.table.take_to_start()) == 1


def test_one_bad_rank_fails_the_attempt_but_only_after_the_other_has_stopped(t):
    """F03: blocks stay reserved until both ranks have stopped."""
    t.expect(), t.admit(), t.offer(), t.table.take_to_start()
    t.answer(0, ok=False)
    assert t.answers == []
    assert t.table.get("r").state is LoadState.PULLING
    t.answer(1)
    assert t.answers == [("t1", "failed", "broken")]
    assert t.finished() == []  # an API server decides: the request keeps waiting with its blocks


def test_another_attempt_after_a_failure_is_pulled(t):
    t.expect(), t.admit(), t.offer(), t.table.take_to_start()
    t.answer(0, ok=False), t.answer(1, ok=False)
    t.offer("t2")
    assert len(t.table.take_to_start()) == 1
    t.answer(0, name="t1"), t.answer(1, name="t1")  # late answers of the old attempt count for nothing
    assert t.finished() == []
    t.answer(0, name="t2"), t.answer(1, name="t2")
    assert t.finished() == [("r", True, False)]


def test_an_unwatched_failure_is_computed_locally(t):
    t.expect(watched=False), t.admit()
    t.table.offer("r", handoff(), None)
    t.table.take_to_start()
    t.answer(0, ok=False), t.answer(1)
    assert t.finished() == [("r", False, False)]
    assert t.table.get("r").state is LoadState.LOCAL


def test_abort_while_pulling_holds_the_blocks_until_the_ranks_have_answered(t):
    t.expect(), t.admit(), t.offer(), t.table.take_to_start()
    t.table.request_ended("r")
    assert t.finished() == []
    t.answer(0), t.answer(1)
    assert t.finished() == [("r", False, True)]
    assert t.answers == [("t1", "gone", "")]


def test_abort_between_admission_and_handoff_frees_the_blocks_once(t):
    t.expect(), t.admit()
    t.table.request_ended("r")
    t.table.request_ended("r")
    assert t.finished() == [("r", False, True)]


def test_abort_before_admission_says_nothing_and_gives_the_handoff_back(t):
    t.expect(), t.offer()
    t.table.request_ended("r")
    assert t.finished() == []
    assert t.given_back == [("t1", False)]
    assert t.answers == [("t1", "gone", "the request has ended")]


@pytest.mark.parametrize("order", list(itertools.permutations(["admit", "offer"])))
def test_zero_tokens_to_move_makes_one_release_and_one_ready(order):
    """I5, F18: the decode side has it all; in either order the lease is released once."""
    t = Table()
    t.expect()
    for step in order:
        t.admit(start=40, end=40) if step == "admit" else t.offer()
    t.offer()  # asked again
    assert t.given_back[0] == ("t1", True)
    assert t.answers[0] == ("t1", "loaded", "")
    assert t.finished() == []


def test_computing_locally_gives_up_the_wait(t):
    t.expect(), t.admit()
    assert t.table.compute_locally("r", "no prefill instance")
    assert t.finished() == [("r", False, False)]
    t.offer()
    assert t.given_back == [("t1", False)]
    assert t.answers[-1][1] == "gone"


def test_computing_locally_while_pulling_waits_for_the_ranks(t):
    t.expect(), t.admit(), t.offer(), t.table.take_to_start()
    t.table.compute_locally("r", "deadline")
    assert t.finished() == []
    t.answer(0), t.answer(1)
    assert t.finished() == [("r", False, False)]


def test_a_wait_without_an_api_server_ends_by_its_deadline(t):
    t.expect(), t.admit()
    t.now = 10.5
    assert t.table.expire_due(1.0) == []
    t.now = 11.5
    assert t.table.expire_due(1.0) == ["r"]
    assert t.finished() == [("r", False, False)]


def test_asking_again_about_the_same_transfer_joins_it(t):
    t.expect(), t.admit(), t.offer()
    t.table.take_to_start()
    t.offer()
    t.answer(0), t.answer(1)
    assert t.answers == [("t1", "loaded", "")]
    assert t.given_back == []


def test_a_lost_answer_is_given_again_and_changes_nothing(t):
    t.expect(), t.admit(), t.offer(), t.table.take_to_start()
    t.answer(0), t.answer(1)
    t.finished()
    t.offer()
    assert t.answers == [("t1", "loaded", ""), ("t1", "loaded", "")]
    assert t.given_back == []


def test_a_new_handoff_for_a_request_that_runs_is_given_back(t):
    t.expect(), t.admit(), t.offer(), t.table.take_to_start()
    t.answer(0), t.answer(1)
    t.offer("t2")
    assert t.given_back == [("t2", False)]
    assert t.answers[-1] == ("t2", "gone", "the request waits for nothing")


class AnyOrder(RuleBasedStateMachine):
    """Events in any order: reported at most once, never while a rank may still write, no lease forgotten."""

    @initialize(watched=st.booleans())
    def start(self, watched):
        self.t = Table(num_ranks=2)
        self.t.expect(watched=watched)
        self.watched, self.admitted, self.ended, self.attempt = watched, False, False, 0
        self.open_ranks: set[int] = set()
        self.reports = []
        self.offered, self.pulled = set(), set()

    @rule(nothing=st.booleans())
    @precondition(lambda self: not self.admitted and not self.ended and self.t.table.get("r"))
    def admit(self, nothing):
        if self.t.table.get("r").state is LoadState.EXPECTED:
            self.t.admit(start=40 if nothing else 0)
            self.admitted = not nothing

    @rule()
    @precondition(lambda self: self.t.table.get("r") is not None)
    def offer(self):
        self.attempt += 1
        self.offered.add(f"t{self.attempt}")
        self.t.offer(f"t{self.attempt}")
        self._start()

    def _start(self):
        for load in self.t.table.take_to_start():
            self.open_ranks = {0, 1}
            self.current = load.handoff.transfer_id
            self.pulled.add(self.current)

    @rule(ok=st.booleans())
    @precondition(lambda self: bool(self.open_ranks))
    def answer(self, ok):
        rank = self.open_ranks.pop()
        self.t.answer(rank, ok, name=self.current)

    @rule()
    @precondition(lambda self: not self.ended)
    def end(self):
        self.ended = True
        self.t.table.request_ended("r")

    @rule()
    def locally(self):
        self.t.table.compute_locally("r", "x")

    @invariant()
    def reported_once_and_quiet(self):
        if not hasattr(self, "t"):
            return
        self._start()
        new = self.t.table.take_finished()
        if new:
            assert not self.open_ranks, "reported while a rank may still write"
        self.reports += new
        assert len(self.reports) <= 1
        if self.reports:
            assert self.admitted

    @invariant()
    def no_lease_forgotten(self):
        if not hasattr(self, "t"):
            return
        load = self.t.table.get("r")
        held = {load.handoff.transfer_id} if load is not None and load.handoff is not None else set()
        back = {name for name, _ in self.t.given_back}
        assert self.offered <= held | back | self.pulled

    def teardown(self):
        """However it went: once the ranks have answered and the request has ended, its blocks were reported once."""
        if not hasattr(self, "t"):
            return
        while self.open_ranks:
            self.answer(True)
            self.reported_once_and_quiet()
        self.t.table.request_ended("r")
        self.reported_once_and_quiet()
        assert len(self.reports) == (1 if self.admitted else 0)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=12, deadline=None)
TestAnyOrder = AnyOrder.TestCase
