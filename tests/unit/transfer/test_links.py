# SPDX-License-Identifier: Apache-2.0
"""The table of links, and how one is made: by address, and together with a prefill rank that is asked first."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from tests.unit.transfer.fakes import MODULE, Datadist, LLMException
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.errors import PDUnreachableError
from vllm_ascend_pd.transfer import links as links_module
from vllm_ascend_pd.transfer.linking import Asker, LinkFailedError, OneSidedLinker, TwoSidedLinker
from vllm_ascend_pd.transfer.links import LinkTable
from vllm_ascend_pd.wire import Ack, DeviceAddress, LinkAsk, LinkEnd, LinkState, RankAddress, Refused


def device(number: int) -> DeviceAddress:
    return DeviceAddress(server_id="10.0.0.1", logical_id=number, physical_id=number, device_ip=f"10.1.0.{number}")


OWN = device(1)
PEER = RankAddress(tp_rank=0, cluster_id=7, host="127.0.0.1", port=1, device=device(0), link_port=2)


class Watcher:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_good = True

    def prepare(self, peer) -> bool:
        self.calls.append(("prepare", peer.cluster_id))
        return self.is_good

    def forget(self, cluster_id: int) -> None:
        self.calls.append(("forget", cluster_id))


class Prefill:
    """The other side's control server; `states` is used up from the front, the last one stays."""

    def __init__(self, *states) -> None:
        self.states = list(states)
        self.asked: list = []

    def get(self, host: str, port: int):
        assert (host, port) == (PEER.host, PEER.link_port)
        return self

    def request(self, message, timeout_s: float, attempts: int):
        self.asked.append(message)
        if isinstance(message, LinkEnd):
            return Ack()
        answer = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Refused) else LinkState(state=answer, detail="why")

    def kinds(self) -> list[type]:
        return [type(message) for message in self.asked]


class TwoSided:
    """An engine with two-sided links; `statuses` is used up from the front, the last one stays."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses) or ["OK"]
        self.calls: list = []
        self.error: Exception | None = None
        self.unlink_error: Exception | None = None

    def link(self, name, ranks, table) -> int:
        self.calls.append(("link", name, dict(ranks)))
        if self.error is not None:
            raise self.error
        return 5

    def unlink(self, comm_id: int) -> None:
        self.calls.append(("unlink", comm_id))
        if self.unlink_error is not None:
            raise self.unlink_error

    def query_register_mem_status(self, comm_id: int):
        return SimpleNamespace(name=self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])

    def verbs(self) -> list[str]:
        return [call[0] for call in self.calls]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def make_two_sided(engine: TwoSided, prefill: Prefill, own: DeviceAddress | None = OWN):
    pauses: list[float] = []
    asker = Asker(prefill, Way.TWO_SIDED, 21, own, pauses.append)
    return TwoSidedLinker(engine, MODULE, asker), pauses


# ---------------------------------------------------------------- the table


def test_a_link_that_somebody_has_made_anew_is_not_dropped_by_who_used_the_old_one():
    engine, watcher = Datadist(), Watcher()
    links = LinkTable(engine, MODULE, "127.0.0.1", watcher)
    first = links.ensure(PEER, soon())
    links.drop_spoilt(7, first)
    second = links.ensure(PEER, soon())
    assert second != first
    links.drop_spoilt(7, first)
    assert links.cluster_ids == [7]
    assert engine.names() == ["link", "unlink", "link"]
    assert watcher.calls == [("prepare", 7), ("forget", 7), ("prepare", 7)]


def test_a_link_that_did_not_go_down_with_its_peer_still_holds_what_its_last_transfer_touched():
    engine = Datadist()
    links = LinkTable(engine, MODULE, "127.0.0.1", Watcher())
    number = links.ensure(PEER, soon())
    engine.unlink_codes = ["TIMEOUT", "UNLINK_FAILED", "TIMEOUT"]
    links.drop([7])  # the peer has ended, and another thread's transfer is under way
    assert links.cluster_ids == []
    assert not links.take_down(7, number)
    with pytest.raises(LinkFailedError, match="has not gone down yet"):
        links.ensure(PEER, soon())
    assert links.take_down(7, number)
    assert engine.names() == ["link"] + ["unlink"] * 4
    assert links.ensure(PEER, soon()) != number


def test_a_failure_of_unlinking_that_nobody_foresaw_is_no_success():
    engine = Datadist()
    links = LinkTable(engine, MODULE, "127.0.0.1", Watcher())
    number = links.ensure(PEER, soon())
    unlink, engine.unlink_clusters = engine.unlink_clusters, None
    assert not links.take_down(7, number)
    engine.unlink_clusters = unlink
    assert links.take_down(7, number)


def test_a_peer_that_has_ended_is_left_to_the_thread_that_links_to_it(monkeypatch):
    monkeypatch.setattr(links_module, "DROP_WAIT_S", 0.05)
    engine = Datadist()
    links = LinkTable(engine, MODULE, "127.0.0.1", Watcher())
    links.ensure(PEER, soon())
    with links._lock_of(7):
        links.drop([7])
    assert engine.names() == ["link"]


def test_waiting_for_another_thread_that_links_ends_at_the_deadline():
    began, go_on = threading.Event(), threading.Event()

    class Slow:
        def link(self, peer, deadline):
            began.set()
            assert go_on.wait(20)

        def unlink(self, cluster_id):
            return True

    links = LinkTable(None, MODULE, "127.0.0.1", Watcher(), Slow())
    thread = threading.Thread(target=links.ensure, args=(PEER, soon()))
    thread.start()
    assert began.wait(10)
    with pytest.raises(LinkFailedError, match="while it was being made"):
        links.ensure(PEER, time.monotonic() + 0.05)
    go_on.set()
    thread.join()
    assert links.cluster_ids == [7]


# ---------------------------------------------------------------- by address


def test_a_prefill_rank_is_asked_before_it_is_dialled_and_told_when_the_link_ends():
    engine, prefill = Datadist(), Prefill("preparing", "ready")
    linker = OneSidedLinker(engine, MODULE, "127.0.0.1", Asker(prefill, Way.HIXL, 21, device(1), lambda _: None))
    linker.link(PEER, soon())
    first, again = prefill.asked
    assert first is again, "the same question, so that it is one link"
    assert (first.way, first.cluster_id, first.peer_cluster_id, first.device) == ("hixl", 21, 7, device(1))
    assert linker.unlink(7)
    assert prefill.asked[2:] == [LinkEnd(link_id=first.link_id)]
    assert engine.names() == ["link", "unlink"]


def test_a_prefill_rank_that_refuses_is_not_dialled():
    engine = Datadist()
    prefill = Prefill(Refused(code="link_mismatch", message="way: other"))
    linker = OneSidedLinker(engine, MODULE, "127.0.0.1", Asker(prefill, Way.HIXL, 21, None))
    with pytest.raises(LinkFailedError, match="way: other"):
        linker.link(PEER, soon())
    assert engine.calls == []


# ---------------------------------------------------------------- by rank table


def test_a_two_sided_link_is_asked_for_made_and_confirmed():
    engine, prefill = TwoSided("PREPARING", "PREPARING", "OK"), Prefill("preparing", "preparing", "linked")
    linker, pauses = make_two_sided(engine, prefill)
    linker.link(PEER, soon())
    ask = prefill.asked[0]
    assert engine.calls == [("link", f"pd_{ask.link_id}", {7: 0, 21: 1})]
    assert prefill.asked == [ask] * 3
    assert len(pauses) == 3
    assert linker.unlink(7)
    assert prefill.asked[3:] == [LinkEnd(link_id=ask.link_id)]
    assert linker.unlink(7), "unknown: nothing to do"
    assert engine.verbs() == ["link", "unlink"]


def test_a_busy_prefill_rank_is_asked_again_with_a_new_link_and_nothing_is_held_meanwhile():
    engine, prefill = TwoSided(), Prefill("busy", "preparing", "linked")
    linker, _ = make_two_sided(engine, prefill)

    def step_back(_seconds: float) -> None:
        if engine.verbs() == []:
            assert linker._creating.acquire(blocking=False), "another link may be made meanwhile"
            linker._creating.release()

    object.__setattr__(linker._asker, "pause", step_back)
    linker.link(PEER, soon())
    assert prefill.asked[0].link_id != prefill.asked[1].link_id
    assert engine.verbs() == ["link"]


def test_no_other_prefill_rank_is_asked_while_a_link_is_made():
    """It would begin its side, and wait for us while we wait for somebody else."""
    engine, prefill = TwoSided(), Prefill("preparing", "linked")
    linker, _ = make_two_sided(engine, prefill)
    began, go_on = threading.Event(), threading.Event()
    link = engine.link

    def slow(name, ranks, table) -> int:
        began.set()
        assert go_on.wait(20)
        return link(name, ranks, table)

    engine.link = slow
    thread = threading.Thread(target=linker.link, args=(PEER, soon()))
    thread.start()
    assert began.wait(10)
    other = RankAddress(tp_rank=1, cluster_id=8, host=PEER.host, port=1, device=device(4), link_port=2)
    with pytest.raises(LinkFailedError, match="while other links were being made"):
        linker.link(other, soon(0.05))
    assert len(prefill.asked) == 1
    go_on.set()
    thread.join()


@pytest.mark.parametrize(
    ("statuses", "states", "text"),
    [
        (("FAILED",), ("preparing",), "FAILED"),
        (("OK",), ("preparing", "failed"), "its side failed: why"),
    ],
)
def test_a_failure_on_either_side_takes_the_link_down_on_both(statuses, states, text):
    engine, prefill = TwoSided(*statuses), Prefill(*states)
    linker, _ = make_two_sided(engine, prefill)
    with pytest.raises(LinkFailedError, match=text):
        linker.link(PEER, soon())
    assert engine.verbs() == ["link", "unlink"]
    assert prefill.kinds()[-1] is LinkEnd
    assert linker._creating.acquire(blocking=False), "others may link"


def test_a_communicator_that_cannot_be_made_is_told_to_the_other_side():
    engine, prefill = TwoSided(), Prefill("preparing")
    engine.error = LLMException("LINK_FAILED")
    linker, _ = make_two_sided(engine, prefill)
    with pytest.raises(LinkFailedError, match="LINK_FAILED"):
        linker.link(PEER, soon())
    assert prefill.kinds() == [LinkAsk, LinkEnd]


def test_a_link_that_stays_in_preparation_ends_at_the_deadline():
    engine, prefill = TwoSided("PREPARING"), Prefill("preparing")
    linker, _ = make_two_sided(engine, prefill)
    with pytest.raises(LinkFailedError, match="still being prepared at the deadline"):
        linker.link(PEER, soon(0.05))
    assert engine.verbs() == ["link", "unlink"]


def test_what_an_earlier_try_began_is_ended_before_another_begins():
    engine, prefill = TwoSided("FAILED", "OK"), Prefill("preparing", "preparing", "linked")
    linker, _ = make_two_sided(engine, prefill)
    engine.unlink_error = LLMException("UNLINK_FAILED")
    for message in ("FAILED", "what an earlier try began has not ended yet"):
        with pytest.raises(LinkFailedError, match=message):
            linker.link(PEER, soon())
    assert engine.verbs() == ["link", "unlink", "unlink"]
    engine.unlink_error = None
    linker.link(PEER, soon())
    assert engine.verbs() == ["link", "unlink", "unlink", "unlink", "link"]


@pytest.mark.parametrize(("code", "is_gone"), [("NOT_YET_LINK", True), ("UNLINK_FAILED", False)])
def test_a_two_sided_link_is_gone_when_it_is_unknown_or_unlinked(code, is_gone):
    engine, prefill = TwoSided(), Prefill("preparing", "linked")
    linker, _ = make_two_sided(engine, prefill)
    linker.link(PEER, soon())
    engine.unlink_error = LLMException(code)
    assert linker.unlink(7) is is_gone


def test_a_two_sided_link_needs_both_devices():
    linker, _ = make_two_sided(TwoSided(), Prefill("preparing"), None)
    with pytest.raises(LinkFailedError, match="the decode rank's device is not known"):
        linker.link(PEER, soon())
    linker, _ = make_two_sided(TwoSided(), Prefill("preparing"))
    with pytest.raises(LinkFailedError, match="the prefill rank's device is not known"):
        linker.link(RankAddress(tp_rank=0, cluster_id=7, host="127.0.0.1", port=1), soon())


def test_a_prefill_rank_that_does_not_answer_fails_the_link():
    linker, _ = make_two_sided(TwoSided(), Prefill(PDUnreachableError("silence")))
    with pytest.raises(LinkFailedError, match="silence"):
        linker.link(PEER, soon())
