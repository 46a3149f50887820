# SPDX-License-Identifier: Apache-2.0
"""The decode half: requests and handoffs meet in any order, and what comes wrong ends at most one request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.engine.fakes import PROMPT, Decode, inline_params, make_handoff, make_request, watched
from vllm_ascend_pd.engine import decode as module
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.loads import LoadState
from vllm_ascend_pd.transfer.peers import Peer
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask


@pytest.fixture
def d() -> Decode:
    return Decode()


# ---------------------------------------------------------------- the good way


@pytest.mark.parametrize("order", ["new deliver admit", "new admit deliver", "deliver new admit"])
def test_a_request_and_its_handoff_meet_in_any_order(d: Decode, order: str):
    request = make_request(params=watched())
    steps = {
        "new": lambda: d.half.new_request(request),
        "deliver": d.deliver,
        "admit": lambda: d.admit(request),
    }
    for step in order.split():
        steps[step]()
    (task,) = d.half.take_tasks()
    assert isinstance(task, PullTask)
    (pull,) = task.pulls
    assert (pull.src_blocks, pull.dst_blocks) == ((5, 6, 7), (1, 2, 3))
    assert d.half.take_tasks() == []
    (finished,) = d.results(0)
    assert (finished.request_id, finished.ok) == ("r", True)
    assert d.answers == [("loaded", "")]
    assert d.stats.totals()["tokens_loaded_remotely"] == len(PROMPT) - 1
    assert d.peers.given_back == []


def test_only_what_is_not_cached_here_is_pulled(d: Decode):
    request = d.new()
    assert d.admit(request, cached=16) == 23
    d.deliver()
    (task,) = d.half.take_tasks()
    assert task.pulls[0].dst_blocks == (2, 3)


def test_everything_cached_here_releases_the_lease_and_does_not_wait(d: Decode):
    request = d.new()
    assert d.admit(request, cached=39) == 0
    d.deliver()
    assert d.half.take_tasks() == []
    assert d.peers.given_back == [("t1", True)]
    assert d.answers == [("loaded", "")]
    assert d.half.step_ended([]) == []


def test_a_request_that_brings_its_handoff_needs_no_api_server(d: Decode):
    request = d.new(params=inline_params(make_handoff()))
    d.half.drain()
    d.admit(request)
    assert len(d.half.take_tasks()) == 1
    assert [f.ok for f in d.results(0)] == [True]


def test_an_inline_handoff_of_a_part_of_the_prompt_is_loaded_as_far_as_it_goes(d: Decode):
    request = d.new(params=inline_params(make_handoff(prompt=PROMPT[:32], block_ids=((5, 6),))))
    d.half.drain()
    assert d.admit(request) == 32
    (task,) = d.half.take_tasks()
    assert task.pulls[0].src_blocks == (5, 6)


# ---------------------------------------------------------------- ranks


def test_a_load_counts_once_however_many_ranks_pulled():
    d = Decode(num_ranks=2)
    d.admit(d.new()), d.deliver(), d.half.take_tasks()
    assert d.results(0) == []
    assert len(d.results(1)) == 1
    totals = d.stats.totals()
    assert (totals["transfers"], totals["tokens"], totals["bytes"]) == (1, 39, 200)


def test_a_load_that_fails_on_both_ranks_is_one_failure():
    d = Decode(num_ranks=2)
    d.admit(d.new()), d.deliver(), d.half.take_tasks()
    d.results(0, 1, ok=False)
    assert d.stats.totals()["failures"] == {"lease_expired": 1}
    assert d.answers == [("failed", "lease_expired")]


def test_bytes_of_an_aborted_load_are_not_a_transfer(d: Decode):
    d.admit(d.new()), d.deliver(), d.half.take_tasks()
    d.half.request_finished("r")
    assert [(f.ok, f.aborted) for f in d.results(0)] == [(False, True)]
    assert d.stats.totals()["transfers"] == 0


# ---------------------------------------------------------------- abort


def test_an_abort_before_the_workers_know_does_not_wait_for_them(d: Decode):
    d.admit(d.new()), d.deliver()
    d.half.request_finished("r")
    assert d.half.take_tasks() == []
    assert [(f.request_id, f.aborted) for f in d.half.step_ended([])] == [("r", True)]
    assert d.peers.given_back == [("t1", False)]


def test_an_abort_while_workers_write_waits_for_them(d: Decode):
    d.admit(d.new()), d.deliver(), d.half.take_tasks()
    d.half.request_finished("r")
    assert d.half.step_ended([]) == []
    assert len(d.results(0)) == 1


def test_giving_up_before_the_workers_know_frees_the_request_at_once(d: Decode):
    d.admit(d.new()), d.deliver()
    d.compute_locally()
    assert d.half.take_tasks() == []
    assert [(f.ok, f.aborted) for f in d.half.step_ended([])] == [(False, False)]
    assert d.peers.given_back == [("t1", False)]


def test_a_handoff_for_a_request_that_has_ended_is_given_back(d: Decode):
    d.new()
    d.half.request_finished("r")
    d.deliver()
    assert d.answers == [("gone", "the request has ended")]
    assert d.peers.given_back == [("t1", False)]


def test_an_answer_lost_on_the_way_is_repeated_even_after_the_request_has_ended(d: Decode):
    d.admit(d.new()), d.deliver(), d.half.take_tasks(), d.results(0)
    d.half.request_finished("r")
    d.deliver()
    assert d.answers == [("loaded", ""), ("loaded", "")]
    assert d.peers.given_back == []


def test_nothing_is_kept_of_a_request_that_has_ended(d: Decode):
    for index in range(3):
        request = d.new(f"r{index}", params=inline_params(make_handoff(f"t{index}")))
        d.half.drain()
        d.admit(request), d.half.take_tasks()
        d.results(0, transfer_id=f"t{index}", request_id=f"r{index}")
        d.half.request_finished(f"r{index}")
    kept = (d.half._requests, d.half._early, d.half._early_local, d.half._max_tokens_of, d.half._inbox)
    assert not any(kept)
    assert sum(d.half.loads.counts().values()) == 0


# ---------------------------------------------------------------- early and late


def test_a_handoff_that_is_early_for_too_long_is_given_back(d: Decode):
    d.deliver()
    assert d.peers.given_back == []
    d.now = module.EARLY_HANDOFF_S + 1
    d.half.drain()
    assert d.peers.given_back == [("t1", False)]
    assert d.answers == [("gone", "the request has ended")]


def test_an_early_handoff_asked_about_again_is_not_given_back(d: Decode):
    d.deliver(), d.deliver()
    d.admit(d.new())
    assert len(d.half.take_tasks()) == 1
    assert d.peers.given_back == []


def test_an_early_handoff_that_another_attempt_replaces_is_given_back(d: Decode):
    d.deliver(make_handoff("t1")), d.deliver(make_handoff("t2"))
    assert d.peers.given_back == [("t1", False)]


def test_giving_up_may_come_before_the_request(d: Decode):
    d.compute_locally()
    request = d.new()
    assert d.half.external_tokens(request, 0) == (0, False)
    d.deliver()
    assert d.peers.given_back == [("t1", False)]


def test_early_give_ups_of_requests_that_never_come_are_bounded(d: Decode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ENDED_IDS", 3)
    for index in range(10):
        d.compute_locally(f"r{index}")
    assert list(d.half._early_local) == ["r7", "r8", "r9"]


def test_a_request_whose_api_server_died_computes_here_after_deadline_and_grace(d: Decode):
    d.admit(d.new())
    d.now = 5.0 + module.DEADLINE_GRACE_S - 0.1
    assert d.half.step_ended([]) == []
    d.now += 0.2
    assert [(f.request_id, f.ok, f.aborted) for f in d.half.step_ended([])] == [("r", False, False)]
    assert d.stats.totals()["failures"] == {"deadline": 1}


# ---------------------------------------------------------------- wrong handoffs


def test_a_handoff_of_another_layout_is_refused_and_given_back(d: Decode):
    d.admit(d.new())
    d.deliver(make_handoff(layout="another"))
    assert [(o, r.partition(":")[0]) for o, r in d.answers] == [("failed", "layout")]
    assert d.peers.given_back == [("t1", False)]
    assert d.half.loads.get("r").state is LoadState.ADMITTED  # the API server may bring another one


def test_a_handoff_for_another_prompt_that_no_api_server_has_compared_is_refused_and_given_back(d: Decode):
    d.new(params=inline_params(make_handoff(prompt=PROMPT[:-1] + (1,))))
    d.half.drain()
    assert d.peers.given_back == [("t1", False)]
    assert d.half.loads.get("r").state is LoadState.LOCAL


def test_a_forged_handoff_is_refused_and_nobody_is_dialled_for_it(d: Decode):
    d.new()
    d.peers.is_known = False
    d.deliver(make_handoff(secret=Secret(b"another")))
    assert d.answers[0][1].startswith("signature")
    assert (d.peers.waiting, d.peers.given_back) == ([], [])


def test_a_handoff_that_another_request_loads_from_is_refused_and_its_lease_kept(d: Decode):
    d.admit(d.new()), d.deliver(), d.half.take_tasks()
    d.new("other")
    d.deliver(request_id="other")
    assert d.answers[0][1].startswith("duplicate")
    assert d.peers.given_back == []


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_handoff_that_another_request_has_loaded_from_does_not_make_a_second_one_wait(d: Decode, is_watched: bool):
    """Its lease is gone; the second request must neither be told "loaded" nor wait for its deadline."""
    d.admit(d.new()), d.deliver(), d.half.take_tasks(), d.results(0)
    if is_watched:
        d.admit(d.new("second"))
        d.deliver(request_id="second")
        assert d.answers[1][0] == "failed"
    else:
        d.new("second", params=inline_params(make_handoff()))
        d.half.drain()
        assert d.half.loads.get("second").state is LoadState.LOCAL


def test_a_rejected_copy_of_a_request_does_not_end_the_lease_that_the_first_one_reads(d: Decode):
    """0.32.0 brings requests that were rejected before admission to the core, and aborts them at once."""
    d.admit(d.new()), d.deliver(), d.half.take_tasks()
    d.new("copy", params=inline_params(make_handoff()), prompt=[0])
    d.half.request_finished("copy")
    d.half.drain()
    assert d.peers.given_back == []


def test_a_request_that_was_rejected_before_admission_gives_its_lease_back(d: Decode):
    d.new("rejected", params=inline_params(make_handoff()), prompt=[0])
    d.half.request_finished("rejected")
    d.half.drain()
    assert d.peers.given_back == [("t1", False)]


@pytest.mark.parametrize("handoff", [None, make_handoff(secret=Secret(b"another"))])
def test_an_inline_handoff_that_cannot_be_used_is_computed_here(d: Decode, handoff):
    request = d.new(params=inline_params(handoff))
    assert d.half.external_tokens(request, 0) == (0, False)


def test_a_plan_that_fails_gives_back_and_tells(d: Decode):
    d.admit(d.new()), d.deliver(make_handoff(block_ids=((5, 6),)))
    assert d.half.take_tasks() == []
    assert d.answers[0][0] == "failed"
    assert d.peers.given_back == [("t1", False)]


def test_a_plan_that_raises_something_unexpected_ends_this_load_only(d: Decode, monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise ZeroDivisionError

    d.admit(d.new()), d.deliver()
    monkeypatch.setattr(module, "plan_pulls", broken)
    assert d.half.take_tasks() == []
    assert d.answers[0][0] == "failed"


def test_a_handoff_whose_check_raises_something_unexpected_ends_its_own_request_only(d: Decode):
    d.new(params=inline_params(make_handoff()), prompt=["not a token"])
    d.half.drain()
    assert d.half.loads.get("r").state is LoadState.LOCAL
    assert d.stats.totals()["failures"] == {"internal": 1}


def test_an_engine_that_was_replaced_while_the_request_waited_is_not_pulled_from(d: Decode):
    request = d.new()
    d.deliver()
    d.peers.is_known = False  # the same address has another epoch now
    d.admit(request)
    assert d.half.take_tasks() == []
    assert "replaced" in d.answers[0][1]


def test_a_peer_that_refuses_fails_the_handoff_with_its_reason(d: Decode):
    d.admit(d.new())
    d.peers.is_known = False
    d.deliver()
    d.peers.waiting.pop()(None, "peer: model differs")
    d.half.drain()
    assert d.answers == [("failed", "peer: model differs")]
    assert d.peers.given_back == []


# ---------------------------------------------------------------- what clients write


@pytest.mark.parametrize("value", ["abc", [], -1, 0, float("nan"), 10**400, None])
def test_a_deadline_that_is_not_ours_is_replaced_by_the_configured_one(value):
    d = Decode(deadline_s=20.0)
    d.new(params={"do_remote_prefill": True, "pd_wait": True, "pd_deadline_ms": value})
    assert d.half.loads.get("r").deadline == 20.0


def test_a_handoff_of_a_client_that_cannot_even_be_encoded_ends_one_request_only(d: Decode):
    params = inline_params(make_handoff())
    params["pd_handoff"]["transfer_id"] = "\ud800"
    request = d.new(params=params)
    assert d.half.external_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("values", [{"prompt": None}, {"resumable": True}])
def test_a_request_whose_kv_token_ids_do_not_determine_is_computed_here_and_its_handoff_given_back(d: Decode, values):
    d.deliver()
    request = d.new(**values)
    assert d.half.external_tokens(request, 0) == (0, False)
    assert d.peers.given_back == [("t1", False)]
    d.deliver(make_handoff("t2"))
    assert d.peers.given_back[1:] == [("t2", False)]


def test_a_request_without_remote_prefill_is_none_of_ours(d: Decode):
    request = make_request(params=None)
    d.half.new_request(request)
    assert d.half.external_tokens(request, 0) == (0, False)
    d.half.blocks_allocated(request, [[1]], 0)
    d.half.request_finished("r")
    assert d.half.step_ended([]) == []


# ---------------------------------------------------------------- other threads


def test_an_answer_that_cannot_be_sent_does_not_hold_the_blocks(d: Decode):
    def broken(_):
        raise ValueError

    d.admit(d.new())
    d.half.loads.offer("r", make_handoff(), broken)
    d.half.take_tasks()
    assert [f.ok for f in d.results(0)] == [True]


def test_messages_of_other_threads_wake_the_engine(d: Decode):
    wakes = []
    d.half.wake = lambda: wakes.append(1)
    d.new()
    d.deliver(), d.compute_locally()
    d.half.peer_replaced(Peer("p", "old", "h", 1, ()))
    assert len(wakes) == 3


def test_a_replaced_engine_is_dropped_by_the_workers_with_the_next_step(d: Decode):
    peer = Peer("p", "old", "h", 1, tuple(SimpleNamespace(cluster_id=i) for i in (3, 4)))
    d.half.peer_replaced(peer)
    assert d.half.take_tasks() == [DropPeer((3, 4))]
    assert d.half.take_tasks() == []


def test_status_counts_while_requests_come(d: Decode):
    """Read by the control thread: the engine thread adds requests meanwhile."""

    class Slow:
        @property
        def state(self):
            d.half.loads.expect(f"r{len(d.half.loads._loads)}", 1.0, True)
            return LoadState.PULLING

    d.half.loads._loads["slow"] = Slow()
    assert d.half.loads.counts()["pulling"] == 1
