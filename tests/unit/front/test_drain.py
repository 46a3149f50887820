# SPDX-License-Identifier: Apache-2.0
"""Draining: signed, shared by all API server processes of an instance, and nothing that is there is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.front.test_http import ASK, EPOCH, SECRET, STATUS, Prefill, client, prefill, until
from vllm_ascend_pd.errors import PDAuthError, PDDraining
from vllm_ascend_pd.front.ask import AskClient, AskFailed
from vllm_ascend_pd.front.drain import BadDrainAsk, DrainSwitch
from vllm_ascend_pd.front.http_messages import DRAIN_PATH
from vllm_ascend_pd.secret import RequestVerifier, Secret, sign_request
from vllm_ascend_pd.up.drain import PATH, DrainOptions, describe_left, drain
from vllm_ascend_pd.wire import StatusReply

__all__ = ["client", "prefill"]  # fixtures
ON, OFF = b'{"draining": true}', b'{"draining": false}'


def make_switch(folder: Path) -> DrainSwitch:
    return DrainSwitch(str(folder), RequestVerifier(SECRET, audience=EPOCH))


def turn(switch: DrainSwitch, body: bytes, *, secret: Secret = SECRET, epoch: str = EPOCH) -> bool:
    switch.verifier.verify("POST", DRAIN_PATH, sign_request(secret, "POST", DRAIN_PATH, body, epoch), body)
    return switch.turn(body)


def test_all_processes_of_an_instance_have_one_switch(tmp_path: Path) -> None:
    here, there = make_switch(tmp_path), make_switch(tmp_path)
    there.check()
    assert turn(here, ON)
    with pytest.raises(PDDraining, match="drained"):
        there.check()
    assert turn(there, ON), "twice is once"
    assert not turn(there, OFF)
    here.check()


@pytest.mark.parametrize(
    "changed", [{"secret": Secret(b"another secret of a deployment")}, {"epoch": "an earlier life"}]
)
def test_only_a_holder_of_the_secret_drains_and_only_this_life(tmp_path: Path, changed: dict[str, Any]) -> None:
    switch = make_switch(tmp_path)
    with pytest.raises(PDAuthError):
        turn(switch, ON, **changed)
    assert not switch.is_on


@pytest.mark.parametrize("body", [b"[]", b'{"draining": 1}', b'{"drain": true}', b"{"])
def test_what_is_not_a_drain_request_changes_nothing(tmp_path: Path, body: bytes) -> None:
    switch = make_switch(tmp_path)
    with pytest.raises(BadDrainAsk, match="not a drain request"):
        turn(switch, body)
    assert not switch.is_on


async def test_a_draining_prefill_instance_says_so_finishes_and_refuses(prefill: Prefill, client: AskClient) -> None:
    prefill.engine.gate.clear()
    running = asyncio.ensure_future(client.ask(prefill.url, EPOCH, ASK, 5))
    await until(lambda: prefill.engine.calls)
    answer = await prefill.post(DRAIN_PATH, ON, sign_request(SECRET, "POST", DRAIN_PATH, ON, EPOCH))
    assert (answer.status_code, answer.json()) == (200, {"draining": True})
    other = msgspec.structs.replace(ASK, transfer_id="d/e/r2/0")
    with pytest.raises(AskFailed, match="drained") as failure:
        await client.ask(prefill.url, EPOCH, other, 5)
    assert failure.value.reason == "busy"  # another instance is asked
    prefill.core.answers = [STATUS]
    assert (await client.get_peer(prefill.url)).draining
    prefill.core.answers = [STATUS]
    assert (await prefill.get("/pd/status")).json()["draining"] is True
    prefill.engine.gate.set()
    assert (await running).first_token_id == 42
    await prefill.post(DRAIN_PATH, OFF, sign_request(SECRET, "POST", DRAIN_PATH, OFF, EPOCH))
    assert (await client.ask(prefill.url, EPOCH, other, 5)).first_token_id == 42


async def test_an_unsigned_drain_is_refused_by_the_endpoint(prefill: Prefill) -> None:
    assert (await prefill.post(DRAIN_PATH, ON, {})).status_code == 401
    bad = await prefill.post(DRAIN_PATH, b"[]", sign_request(SECRET, "POST", DRAIN_PATH, b"[]", EPOCH))
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "pd_bad_request")
    assert not prefill.drain.is_on


# ---------------------------------------------------------------- vllm pd drain


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def pause(self, seconds: float) -> None:
        self.now += seconds


def run(monkeypatch: pytest.MonkeyPatch, left: list[dict[str, Any]], **options: Any) -> tuple[int, list[str]]:
    """`left`: what /pd/status says, one after the other; the last one for ever."""
    monkeypatch.setattr("vllm_ascend_pd.up.drain.send", lambda *_: None)
    clock, said = Clock(), []  # type: ignore[var-annotated]

    def fetch(_: str) -> dict[str, Any]:
        return left.pop(0) if len(left) > 1 else left[0]

    code = drain(DrainOptions("http://h:1", **options), said.append, fetch, clock.pause, lambda: clock.now)
    return code, said


def test_it_waits_until_nothing_is_left_and_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    two, one = {"requests": {"unfinished": 2}, "leases": {"held": 1}}, {"leases": {"held": 1}}
    code, said = run(monkeypatch, [{}, two, two, one, {"requests": {"unfinished": 0}}])
    assert code == 0
    assert said == [
        "http://h:1: waiting for 2 requests, 1 leases",
        "http://h:1: waiting for 1 leases",
        "http://h:1 is drained",
    ]


def test_what_is_left_at_the_end_of_the_time_is_named_and_the_exit_code_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(monkeypatch, [{"requests": {"unfinished": 1}}], timeout_s=3.0)
    assert code == 1
    assert said[-1] == "http://h:1 is not empty after 3 s: 1 requests. They go on; nothing was stopped"


def test_nobody_waits_when_told_so_or_when_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"requests": {"unfinished": 1}}
    assert run(monkeypatch, [busy], timeout_s=0) == (0, ["http://h:1 takes no new requests; left: 1 requests"])
    assert run(monkeypatch, [busy], undo=True) == (0, ["http://h:1 takes requests again"])


def test_the_numbers_of_the_api_server_count_too() -> None:
    assert describe_left({"api_server": {"waiting_for_kv": 1, "prefills_in_flight": 2}}) == (
        "1 requests that wait for KV, 2 prefills"
    )


async def test_the_command_drains_the_endpoint_and_says_when_the_secret_is_wrong(
    prefill: Prefill, tmp_path: Path
) -> None:
    assert PATH == DRAIN_PATH
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(SECRET.value), wrong.write_text("another secret of a deployment")
    right.chmod(0o600), wrong.chmod(0o600)
    status = StatusReply(status={"leases": {"held": 0}, "requests": {"unfinished": 0}})
    said: list[str] = []
    prefill.core.answers = [status]
    with pytest.raises(PDAuthError, match="wrong: give the --pd-secret-file"):
        await asyncio.to_thread(drain, DrainOptions(prefill.url, str(wrong)), said.append)
    prefill.core.answers = [status, status]
    assert await asyncio.to_thread(drain, DrainOptions(prefill.url, str(right)), said.append) == 0
    assert said == [f"{prefill.url} is drained"]
    assert prefill.drain.is_on
