# SPDX-License-Identifier: Apache-2.0
"""Start of a decode instance, and the pool's health afterwards."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.unit.front.fakes import FakeCore, make_config, unreachable
from vllm_ascend_pd.errors import PDRefusedError, PDUnreachableError
from vllm_ascend_pd.front import watch
from vllm_ascend_pd.front.ask import AskFailed
from vllm_ascend_pd.front.http_messages import PeerFacts
from vllm_ascend_pd.front.pool import MemberState, PrefillPool
from vllm_ascend_pd.front.watch import PoolWatcher
from vllm_ascend_pd.wire import WIRE_VERSION, ConnectPeer, ConnectResult, Refused

LINKED = ConnectResult(outcome="linked")
REFUSED = ConnectResult(
    outcome="refused", refused=Refused(code="handshake", message="m", field="dtype", ours="bfloat16", theirs="float16")
)


def facts(epoch: str = "e1", **values: Any) -> PeerFacts:
    values = {"role": "prefill", "wire_version": WIRE_VERSION, **values}
    return PeerFacts(engine_id="pd-p", epoch=epoch, host="p1", port=5, **values)


class FakePeers:
    """What each URL answers; an exception is raised. Missing URLs do not answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = answers
        self.asked: list[str] = []

    async def get_peer(self, url: str) -> PeerFacts:
        self.asked.append(url)
        answer = self.answers.get(url, AskFailed("unreachable", f"{url} does not answer: refused"))
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


class Start:
    def __init__(self, answers: dict[str, Any], resolve: Any = None, **values: Any) -> None:
        self.now_s = 0.0
        self.config = make_config(**values)
        self.pool = PrefillPool(self.config.static_prefill_urls, lambda: self.now_s)
        self.peers, self.core = FakePeers(**answers), FakeCore()
        self.watcher = PoolWatcher(self.config, self.pool, self.peers, self.core, resolve)

    async def probe_again(self) -> None:
        self.now_s += 60
        await self.watcher.probe_due()

    @property
    def states(self) -> list[MemberState]:
        return [member.state for member in self.pool.members]


async def test_start_ends_when_the_first_instance_is_linked() -> None:
    start = Start({"http://p2:2": facts()})
    start.core.answers = [LINKED]
    await start.watcher.wait_for_first()
    assert start.states == [MemberState.DEAD, MemberState.HEALTHY]
    assert start.core.messages == [ConnectPeer(host="p1", port=5)]
    assert start.watcher.is_any_linked


async def test_start_without_urls_waits_for_nobody() -> None:
    start = Start({}, prefill_urls=())
    await asyncio.wait_for(start.watcher.wait_for_first(), 1)


async def test_a_refusal_at_start_names_the_field_and_both_values() -> None:
    """F37, F68: the decode instance exits; another healthy instance does not hide the mistake."""
    start = Start({"http://p1:1": facts(), "http://p2:2": facts()})
    start.core.answers = [LINKED, REFUSED]
    with pytest.raises(PDRefusedError, match=r"http://p\d:\d.*dtype is bfloat16 there and float16 here"):
        await start.watcher.wait_for_first()


async def test_a_silent_start_ends_at_its_timeout_and_names_every_url() -> None:
    start = Start({}, start_timeout_s=0.05)
    with pytest.raises(PDUnreachableError) as caught:
        await start.watcher.wait_for_first()
    for part in ("--pd-start-timeout", "0.05 s", "http://p1:1", "http://p2:2", "refused", "--pd-role prefill"):
        assert part in str(caught.value)


async def test_progress_is_logged_while_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "PROGRESS_S", 0.01)
    monkeypatch.setattr(watch, "TICK_S", 0.005)
    start = Start({}, start_timeout_s=0.1)
    with caplog.at_level(logging.INFO, watch.__name__), pytest.raises(PDUnreachableError):
        await start.watcher.wait_for_first()
    waiting = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert len(waiting) >= 2
    assert "http://p1:1" in waiting[0]


async def test_a_control_address_that_does_not_answer_is_not_linked() -> None:
    start = Start({"http://p1:1": facts()}, prefill_urls=("http://p1:1",))
    start.core.answers = [ConnectResult(outcome="unreachable", detail="no connection")]
    await start.watcher.probe_due()
    (member,) = start.pool.members
    assert member.state is MemberState.DEAD
    assert "p1:5" in member.detail
    assert "no connection" in member.detail


@pytest.mark.parametrize(
    ("answer", "part"),
    [(facts(role="decode"), "decode"), (facts(wire_version=WIRE_VERSION + 1), "wire_version")],
)
async def test_a_misfit_is_refused_before_the_handshake(answer: PeerFacts, part: str) -> None:
    start = Start({"http://p1:1": answer}, prefill_urls=("http://p1:1",))
    await start.watcher.probe_due()
    (member,) = start.pool.members
    assert member.state is MemberState.REFUSED
    assert part in member.detail
    assert not start.core.messages


async def test_a_healthy_instance_is_not_shaken_hands_with_again() -> None:
    start = Start({"http://p1:1": facts()}, prefill_urls=("http://p1:1",))
    start.core.answers = [LINKED]
    await start.watcher.probe_due()
    await start.probe_again()
    assert len(start.peers.asked) == 2
    assert len(start.core.messages) == 1


async def test_a_new_epoch_is_shaken_hands_with() -> None:
    """F36, I9: a restarted instance is another peer."""
    start = Start({"http://p1:1": facts()}, prefill_urls=("http://p1:1",))
    start.core.answers = [LINKED, LINKED]
    await start.watcher.probe_due()
    start.peers.answers["http://p1:1"] = facts("e2")
    await start.probe_again()
    assert len(start.core.messages) == 2
    assert start.pool.members[0].epoch == "e2"


async def test_a_draining_instance_keeps_its_asks_and_gets_no_new_ones() -> None:
    start = Start({"http://p1:1": facts(draining=True)}, prefill_urls=("http://p1:1",))
    await start.watcher.probe_due()
    assert (start.states, start.core.messages) == ([MemberState.DRAINING], [])
    start.peers.answers["http://p1:1"] = facts()
    start.core.answers = [LINKED]
    await start.probe_again()
    given_up: list[int] = []
    member = start.pool.members[0]
    start.pool.start_ask(member, 10, lambda: given_up.append(1))
    start.peers.answers["http://p1:1"] = facts(draining=True)
    for _ in range(3):
        await start.probe_again()
    assert (start.states, start.pool.choose([1, 2]), given_up) == ([MemberState.DRAINING], None, [])
    start.peers.answers["http://p1:1"] = facts()
    start.core.answers = [LINKED]
    await start.probe_again()
    assert start.pool.choose([1, 2]) is member


async def test_a_lost_instance_comes_back_by_itself() -> None:
    start = Start({"http://p1:1": facts()}, prefill_urls=("http://p1:1",))
    start.core.answers = [LINKED, LINKED]
    await start.watcher.probe_due()
    del start.peers.answers["http://p1:1"]
    await start.probe_again()
    assert start.states == [MemberState.DEAD]
    start.peers.answers["http://p1:1"] = facts()
    await start.probe_again()
    assert start.states == [MemberState.HEALTHY]


async def test_an_instance_restarted_with_other_settings_is_refused_and_found_again() -> None:
    start = Start({"http://p1:1": facts()}, prefill_urls=("http://p1:1",))
    start.core.answers = [LINKED, REFUSED, LINKED]
    await start.watcher.probe_due()
    start.peers.answers["http://p1:1"] = facts("e2")
    await start.probe_again()
    assert start.states == [MemberState.REFUSED]
    start.peers.answers["http://p1:1"] = facts("e3")
    await start.probe_again()
    assert start.states == [MemberState.HEALTHY]


async def test_a_silent_engine_core_of_ours_is_no_health_of_theirs() -> None:
    start = Start({"http://p1:1": facts()}, prefill_urls=("http://p1:1",))
    start.core.answers = [unreachable()]
    await start.watcher.probe_due()
    assert start.states == [MemberState.DEAD]


async def test_a_name_is_resolved_to_all_of_its_addresses() -> None:
    """F71: IPv6 addresses get their brackets."""
    start = Start(
        {"http://10.0.0.1:8100": facts(), "http://[fd00::1]:8100": facts()},
        resolve=lambda host, port: [f"10.0.0.1:{port}", f"[fd00::1]:{port}"],
        prefill_urls=("dns+http://prefill.svc:8100",),
    )
    start.core.answers = [LINKED, LINKED]
    await start.watcher.wait_for_first()
    assert [member.url for member in start.pool.members] == ["http://10.0.0.1:8100", "http://[fd00::1]:8100"]
    assert start.pool.num_healthy == 2


async def test_a_name_that_does_not_resolve_keeps_whom_we_have() -> None:
    found = [["10.0.0.1:1"]]

    def resolve(host: str, port: int) -> list[str]:
        if not found:
            raise OSError("no such name")
        return found.pop()

    start = Start({"http://10.0.0.1:1": facts()}, resolve=resolve, prefill_urls=("dns+http://p:1",))
    start.core.answers = [LINKED]
    await start.watcher.probe_due()
    start.watcher._resolved_at_s = float("-inf")
    await start.watcher.probe_due()
    assert start.states == [MemberState.HEALTHY]


def test_resolving_gives_host_and_port() -> None:
    assert watch.resolve_name("127.0.0.1", 81) == ["127.0.0.1:81"]
    assert watch.resolve_name("::1", 81) == ["[::1]:81"]
