# SPDX-License-Identifier: Apache-2.0
"""One rank's pulls: the lease is checked before and after, links are mended once, every task is answered."""

from __future__ import annotations

import threading
import time

import pytest

from tests.unit.transfer.fakes import BLOCK_BYTES, CACHES_HASH, HELD, NUM_LAYERS, Clock, LLMException, Rank, make_task
from vllm_ascend_pd.errors import PDUnreachableError
from vllm_ascend_pd.transfer import linking, moving, puller
from vllm_ascend_pd.transfer import links as links_module
from vllm_ascend_pd.transfer.tasks import DropPeer
from vllm_ascend_pd.wire import LeaseRelease, LeaseRenew, LeaseVerdict, RankAddress, Refused


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.workers.close()
    assert rank.clients.closed


def test_a_pull_renews_links_pulls_and_releases(rank: Rank):
    result = rank.pull()
    assert (result.ok, result.num_bytes) == (True, NUM_LAYERS * 2 * BLOCK_BYTES)
    assert rank.clients.kinds() == [LeaseRenew, LeaseRelease]
    assert {message.reader for message in rank.clients.asked} == {"e0"}
    assert rank.datadist.calls == [("link", 7), ("pull", (7, 0), (5, 6), (1, 2), range(NUM_LAYERS))]
    assert rank.pull().ok
    assert rank.datadist.names() == ["link", "pull", "pull"], "a link is made once"


def test_a_lease_that_is_lost_before_the_first_byte_moves_nothing(rank: Rank):
    rank.clients.answers = [LeaseVerdict(held=False, state="expired")]
    result = rank.pull()
    assert (result.ok, result.reason) == (False, "lease_expired")
    assert rank.datadist.calls == []
    assert rank.clients.kinds() == [LeaseRenew]


def test_a_lease_that_was_lost_during_the_pull_spoils_its_bytes(rank: Rank):
    rank.clients.answers = [HELD, LeaseVerdict(held=False, state="cancelled")]
    result = rank.pull()
    assert (result.ok, result.reason) == (False, "lease_cancelled")
    assert rank.datadist.names() == ["link", "pull"]


def test_a_spoilt_link_is_made_anew_once(rank: Rank):
    rank.datadist.pull_errors = [LLMException("NOT_YET_LINK")]
    assert rank.pull().ok
    assert rank.datadist.names() == ["link", "unlink", "link", "pull"]


def test_a_link_that_stays_spoilt_fails_the_pull_and_gives_the_lease_back(rank: Rank):
    rank.datadist.pull_errors = [LLMException("NOT_YET_LINK")] * 2
    result = rank.pull()
    assert (result.ok, result.reason) == (False, "pull: NOT_YET_LINK")
    assert rank.datadist.names() == ["link", "unlink", "link", "unlink"]
    assert rank.clients.kinds() == [LeaseRenew, LeaseRelease]


@pytest.mark.parametrize("code", ["TIMEOUT", "FAILED", "SUSPECT_REMOTE_ERROR"])
def test_a_transfer_that_ended_nobody_knows_how_is_not_tried_again_and_its_link_is_dropped(rank: Rank, code: str):
    rank.datadist.pull_errors = [LLMException(code)]
    assert rank.pull().reason == f"pull: {code}"
    assert rank.datadist.names() == ["link", "unlink"]


def test_the_blocks_of_a_spoilt_pull_are_not_answered_for_before_its_link_is_down(rank: Rank, monkeypatch):
    pauses = []
    monkeypatch.setattr(rank.workers._context.links, "_pause", pauses.append)
    rank.datadist.pull_errors = [LLMException("TIMEOUT")]
    rank.datadist.unlink_codes = ["TIMEOUT", "UNLINK_FAILED"]
    assert not rank.pull().ok
    assert rank.datadist.names() == ["link", "unlink", "unlink", "unlink"]
    assert len(pauses) == 1  # the first try is the pull thread's own


def test_a_link_that_does_not_go_down_holds_up_its_own_request_alone(rank: Rank, monkeypatch):
    may_go = threading.Event()
    monkeypatch.setattr(rank.workers._context.links, "_pause", lambda seconds: may_go.wait(10))
    monkeypatch.setattr(puller, "STUCK_S", -1.0)
    rank.datadist.pull_errors = [LLMException("TIMEOUT")]
    rank.datadist.unlink_codes = ["TIMEOUT"] * 3
    rank.workers.submit(make_task())
    other = RankAddress(tp_rank=0, cluster_id=8, host="127.0.0.1", port=3, caches=CACHES_HASH)
    assert rank.pull(ranks=(other,)).ok  # one pull thread only, and it is free
    refused = rank.pull()
    assert "has not gone down yet" in refused.reason
    rank.workers.submit(DropPeer((7,)))
    assert rank.pull(ranks=(other,)).ok
    assert "stuck: thread pd-unlink-7" in rank.workers.find_problems()
    may_go.set()
    assert rank.answer().reason == "pull: TIMEOUT"
    assert "stuck: thread pd-unlink-7" not in rank.workers.find_problems()


def test_staging_slots_come_back_when_the_spoilt_link_is_down(rank: Rank, monkeypatch):
    seen = []
    ways = rank.workers._context.ways
    monkeypatch.setattr(ways, "take_withheld", lambda cluster_id: [cluster_id])
    monkeypatch.setattr(ways, "put_back", lambda slots: seen.append((slots, rank.datadist.names())))
    rank.datadist.pull_errors = [LLMException("TIMEOUT")]
    rank.pull()
    assert seen == [([7], ["link", "unlink"])]


def test_a_link_whose_measuring_ended_undefined_is_taken_down_before_its_slots_are_used(rank: Rank, monkeypatch):
    seen = []
    ways = rank.workers._context.ways
    monkeypatch.setattr(ways, "prepare", lambda peer: False)
    monkeypatch.setattr(ways, "take_withheld", lambda cluster_id: [cluster_id])
    monkeypatch.setattr(ways, "put_back", lambda slots: seen.append((slots, rank.datadist.names())))
    result = rank.pull()
    assert (result.ok, "measuring it ended undefined" in result.reason) == (False, True)
    monkeypatch.setattr(ways, "prepare", lambda peer: True)
    for _ in range(100):
        if seen:
            break
        time.sleep(0.05)
    assert seen == [([7], ["link", "unlink"])]
    assert rank.pull().ok


def test_a_refused_argument_leaves_the_link(rank: Rank):
    rank.datadist.pull_errors = [LLMException("PARAM_INVALID")]
    assert not rank.pull().ok
    assert rank.pull().ok
    assert rank.datadist.names() == ["link", "pull"]


def test_a_busy_data_plane_is_asked_again_over_the_same_link(rank: Rank, monkeypatch):
    pauses = []
    monkeypatch.setattr(rank.workers._context, "pause", pauses.append)
    rank.datadist.pull_errors = [LLMException("LINK_BUSY"), LLMException("OUT_OF_MEMORY")]
    assert rank.pull().ok
    assert rank.datadist.names() == ["link", "pull"]
    assert pauses == [puller.WAIT_S] * 2


@pytest.mark.parametrize(
    ("code", "reason"), [("TIMEOUT", "LLMStatusCode.LLM_TIMEOUT"), (LLMException("TIMEOUT"), "TIMEOUT")]
)
def test_a_link_that_is_refused_fails_the_pull_and_gives_the_lease_back(rank: Rank, code, reason: str):
    rank.datadist.link_codes = [code]
    assert rank.pull().reason == f"link: to 127.0.0.1:1 (rank 0): {reason}"
    assert rank.clients.kinds() == [LeaseRenew, LeaseRelease]
    assert rank.datadist.names() == ["link", "unlink"], "what there may be of it is taken down"


def test_a_link_that_nobody_here_knows_of_is_dropped_and_made_anew(rank: Rank):
    rank.datadist.link_codes = ["ALREADY_LINK"]
    assert rank.pull().ok
    assert rank.datadist.names() == ["link", "unlink", "link", "pull"]


def test_a_link_that_is_there_again_and_again_fails_the_pull(rank: Rank):
    rank.datadist.link_codes = ["ALREADY_LINK"] * 2
    assert not rank.pull().ok
    assert rank.datadist.names() == ["link", "unlink", "link", "unlink"]


def test_a_busy_peer_is_dialled_again(rank: Rank, monkeypatch):
    monkeypatch.setattr(rank.workers._context.links._linker, "_pause", lambda _: None)
    rank.datadist.link_codes = ["LINK_BUSY", "PROCESSING_LINK"]
    assert rank.pull().ok
    assert rank.datadist.names() == ["link"] * 3 + ["pull"]


def test_a_prefill_side_without_this_rank_fails_the_pull(rank: Rank):
    result = rank.pull(ranks=(RankAddress(tp_rank=3, cluster_id=7, host="h", port=1),))
    assert not result.ok
    assert "[3]" in result.reason


def test_a_refused_control_message_fails_the_pull(rank: Rank):
    rank.clients.answers = [Refused(code="unsupported", message="not here")]
    assert rank.pull().reason == "lease: not here"


def test_an_unexpected_exception_is_answered_and_the_thread_goes_on(rank: Rank):
    rank.datadist.pull_errors = [ZeroDivisionError("x")]
    assert rank.pull().reason == "ZeroDivisionError: x"
    assert rank.pull().ok
    assert rank.workers.find_problems() == []


def test_links_of_an_ended_peer_are_dropped_and_made_anew(rank: Rank):
    rank.pull()
    rank.workers.submit(DropPeer((7, 8)))
    assert rank.pull().ok
    assert rank.datadist.calls[2:5] == [("unlink", 7), ("unlink", 8), ("link", 7)]


def test_a_drop_that_fails_does_not_end_the_thread(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise OSError("x")

    unlink = rank.datadist.unlink_clusters
    monkeypatch.setattr(rank.datadist, "unlink_clusters", broken)
    rank.workers.submit(DropPeer((7,)))
    assert "has not gone down yet" in rank.pull().reason
    assert rank.workers.find_problems() == []
    monkeypatch.setattr(rank.datadist, "unlink_clusters", unlink)
    assert rank.pull().ok


# ---------------------------------------------------------------- slices and deadlines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(puller, "time", clock)
    monkeypatch.setattr(moving, "time", clock)
    monkeypatch.setattr(links_module, "time", clock)
    monkeypatch.setattr(linking, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("slice_bytes", "layers"),
    [
        (8 * BLOCK_BYTES, [range(4)]),
        (7 * BLOCK_BYTES, [range(3), range(3, 4)]),
        (4 * BLOCK_BYTES, [range(2), range(2, 4)]),
        (1, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
    ],
)
def test_a_pull_is_cut_into_slices_of_layers_by_bytes(rank: Rank, monkeypatch, slice_bytes: int, layers: list[range]):
    monkeypatch.setattr(moving, "SLICE_BYTES", slice_bytes)
    assert rank.pull().num_bytes == NUM_LAYERS * 2 * BLOCK_BYTES
    assert [call[4] for call in rank.datadist.calls if call[0] == "pull"] == layers


@pytest.mark.parametrize(("deadline_s", "remaining_ms"), [(3.0, 30000), (30.0, 3000)])
def test_no_slice_begins_after_the_deadline_or_without_lease_time(
    clock: Clock, rank: Rank, monkeypatch, deadline_s: float, remaining_ms: int
):
    monkeypatch.setattr(moving, "SLICE_BYTES", 1)
    rank.clients.answers = [LeaseVerdict(held=True, state="held", remaining_ms=remaining_ms)]

    def two_seconds() -> None:
        clock.now += 2

    rank.datadist.before_pull = two_seconds
    assert rank.pull(deadline_s=deadline_s).reason.startswith("deadline")
    assert rank.datadist.names() == ["link", "pull", "pull"]
    assert rank.clients.kinds() == [LeaseRenew, LeaseRelease]


def test_time_in_the_queue_counts_against_the_deadline(clock: Clock, rank: Rank):
    def slow() -> None:
        began.set()
        assert go_on.wait(10)
        clock.now += 20
        rank.datadist.before_pull = lambda: None

    began, go_on = threading.Event(), threading.Event()
    rank.datadist.before_pull = slow
    rank.workers.submit(make_task())
    assert began.wait(10)
    rank.workers.submit(make_task(deadline_s=10.0))
    go_on.set()
    assert rank.answer().ok
    assert rank.answer().reason.startswith("deadline")
    assert rank.datadist.names() == ["link", "pull"]


# ---------------------------------------------------------------- a dead prefill engine


def test_an_engine_that_does_not_answer_is_asked_once(rank: Rank):
    rank.clients.answers = [PDUnreachableError("tcp://h:1 did not answer")]
    assert rank.pull().reason == "unreachable: tcp://h:1 did not answer"
    assert rank.clients.kinds() == [LeaseRenew]


def test_an_engine_that_dies_before_the_last_verdict_spoils_the_bytes(rank: Rank):
    rank.clients.answers = [HELD, PDUnreachableError("gone")]
    result = rank.pull()
    assert (result.ok, result.reason) == (False, "unreachable: gone")


def test_pulls_that_queued_behind_a_silent_engine_fail_at_once_and_later_ones_try_again(clock: Clock, rank: Rank):
    """Else one dead prefill engine holds up the living ones by a timeout for each of its requests."""

    def silence(*_):
        began.set()
        assert go_on.wait(10)
        clock.now += 5
        del rank.clients.request
        raise PDUnreachableError("dead")

    began, go_on = threading.Event(), threading.Event()
    rank.clients.request = silence
    rank.workers.submit(make_task())
    assert began.wait(10)
    rank.workers.submit(make_task())
    go_on.set()
    assert rank.answer().reason == "unreachable: dead"
    assert rank.answer().reason.startswith("unreachable: its prefill engine did not answer")
    assert rank.clients.asked == []
    clock.now += 1
    assert rank.pull().ok


# ---------------------------------------------------------------- health


def test_a_pull_that_hangs_beyond_its_deadline_is_a_problem_until_it_ends(clock: Clock, rank: Rank):
    began, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert go_on.wait(10)

    rank.datadist.before_pull = slow
    rank.workers.submit(make_task(deadline_s=20.0))
    assert began.wait(10)
    clock.now += 20 + puller.STUCK_S - 1
    assert rank.workers.find_problems() == []
    clock.now += 2
    assert rank.workers.find_problems() == ["stuck: thread pd-pull-0"]
    go_on.set()
    rank.answer()
    rank.pull()
    assert rank.workers.find_problems() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_a_problem(rank: Rank, monkeypatch: pytest.MonkeyPatch):
    def die(*_):
        raise SystemExit

    monkeypatch.setattr(puller, "_execute", die)
    rank.workers.submit(make_task())
    rank.workers._threads[0].join(10)
    assert rank.workers.find_problems() == ["dead: thread pd-pull-0"]


# ---------------------------------------------------------------- close


def test_closing_lets_the_running_pull_end():
    rank = Rank()
    began, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert go_on.wait(10)

    rank.datadist.before_pull = slow
    rank.workers.submit(make_task())
    assert began.wait(10)
    closing = threading.Thread(target=rank.workers.close)
    closing.start()
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    assert [result.ok for result in rank.workers.take_answers()] == [True]
    assert rank.workers.find_problems() == [], "threads that were asked to end are not missed"
