# SPDX-License-Identifier: Apache-2.0
"""The prefill client against the real endpoints, over real sockets, with a fake engine behind them."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fastapi import FastAPI

from tests.unit.front.fakes import FakeCore, make_config, make_handoff, unreachable
from vllm_ascend_pd.config import PDRole
from vllm_ascend_pd.front import hooks, routes
from vllm_ascend_pd.front.ask import AskClient, AskFailed
from vllm_ascend_pd.front.drain import DrainSwitch
from vllm_ascend_pd.front.http_messages import MAX_BODY_BYTES, PrefillAsk
from vllm_ascend_pd.front.server import PrefillServer
from vllm_ascend_pd.handoff import ask_bytes, prompt_digest
from vllm_ascend_pd.secret import AUTH_HEADER, RequestVerifier, Secret, sign_request
from vllm_ascend_pd.wire import WIRE_VERSION, CancelTransfer, HealthReply, StatusReply

SECRET = Secret(b"0123456789abcdef", from_file=True)
EPOCH = "e0"
ASK = PrefillAsk(transfer_id="d/e/r1/0", token_ids=[1, 2, 3, 4], cache_salt="salt", priority=2)
STATUS = StatusReply(status={"control": {"host": "10.0.0.1", "port": 4567}, "leases": {"held": 0}})


class FakeEngine:
    """An engine client whose `generate` ends when `gate` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_aborted = 0
        self.params: dict[str, Any] | None = None
        self.error: Exception | None = None

    async def generate(self, prompt: Any, sampling: Any, request_id: str, priority: int) -> AsyncIterator[Any]:
        self.calls.append((prompt, sampling, request_id, priority))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        if self.error is not None:
            raise self.error
        params = sampling.extra_args["kv_transfer_params"]
        handoff = msgspec.structs.replace(make_handoff(params["pd_transfer_id"]), prompt_digest="d" * 64)
        signed = msgspec.structs.replace(handoff, signature="s" * 64)
        answer = {"pd_handoff": msgspec.to_builtins(signed)} if self.params is None else self.params
        output = SimpleNamespace(token_ids=[42], finish_reason="length")
        yield SimpleNamespace(outputs=[output], kv_transfer_params=answer, num_cached_tokens=3)


class Prefill:
    """A prefill instance's API server on a real port."""

    def __init__(self, folder: Path) -> None:
        self.config = make_config(PDRole.PREFILL)
        self.core, self.engine = FakeCore(), FakeEngine()
        self.drain = DrainSwitch(str(folder), RequestVerifier(SECRET, audience=EPOCH))
        self.server = PrefillServer(self.config, SECRET, self.core, self.drain)
        self.instance = SimpleNamespace(
            config=self.config,
            core=self.core,
            server=self.server,
            front=None,
            drain=self.drain,
            to_status=self.server.to_status,
        )
        self.app = FastAPI()
        self.app.state.engine_client = self.engine
        routes.attach(self.app)
        self.url = ""

    async def serve(self) -> AsyncIterator[Prefill]:
        uvicorn_config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(uvicorn_config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield self
        server.should_exit = True
        await task

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.post(self.url + path, content=body, headers=headers)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.get(self.url + path)


@pytest.fixture
async def prefill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Prefill]:
    pytest.importorskip("vllm.sampling_params")  # now: importing it inside a request would stop the loop for seconds
    pytest.importorskip("vllm.inputs")
    started = Prefill(tmp_path)
    monkeypatch.setattr(hooks, "_instances", {started.engine: started.instance})
    async for running in started.serve():
        yield running


@pytest.fixture
async def client() -> AsyncIterator[AskClient]:
    made = AskClient(SECRET)
    yield made
    await made.aclose()


async def until(condition: Any) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 5)


async def test_an_ask_computes_one_token_and_brings_the_handoff(prefill: Prefill, client: AskClient) -> None:
    answer = await client.ask(prefill.url, EPOCH, ASK, 5)
    assert (answer.handoff.transfer_id, answer.first_token_id, answer.cached_tokens) == ("d/e/r1/0", 42, 3)
    ((prompt, sampling, request_id, priority),) = prefill.engine.calls
    assert (prompt["prompt_token_ids"], prompt["cache_salt"], priority) == ([1, 2, 3, 4], "salt", 2)
    assert (sampling.max_tokens, sampling.temperature, sampling.detokenize, sampling.n) == (1, 0.0, False, 1)
    assert request_id == "pd-d/e/r1/0"
    params = sampling.extra_args["kv_transfer_params"]
    assert params["do_remote_decode"] is True
    assert params["pd_prompt_digest"] == prompt_digest([1, 2, 3, 4])
    assert SECRET.verify(params["pd_ask"], "ask", ask_bytes("d/e/r1/0", params["pd_prompt_digest"]))


async def test_the_peer_facts_name_the_engine_core_s_control_address(prefill: Prefill, client: AskClient) -> None:
    prefill.core.answers = [STATUS]
    facts = await client.get_peer(prefill.url)
    assert (facts.role, facts.engine_id, facts.epoch) == ("prefill", "pd-d", EPOCH)
    assert (facts.host, facts.port, facts.wire_version) == ("10.0.0.1", 4567, WIRE_VERSION)


async def test_another_secret_is_unauthorized_and_computes_nothing(prefill: Prefill) -> None:
    stranger = AskClient(Secret(b"another secret!!", from_file=True))
    with pytest.raises(AskFailed) as caught:
        await stranger.ask(prefill.url, EPOCH, ASK, 5)
    await stranger.aclose()
    assert caught.value.reason == "unauthorized"
    assert "--pd-secret-file" in str(caught.value)
    assert not prefill.engine.calls


@pytest.mark.parametrize("path", ["/pd/prefill", "/pd/cancel"])
async def test_unsigned_and_replayed_posts_are_refused(prefill: Prefill, path: str) -> None:
    body = msgspec.json.encode(ASK)
    assert (await prefill.post(path, body, {})).status_code == 401
    headers = sign_request(SECRET, "POST", path, body, EPOCH)
    assert (await prefill.post(path, body + b" ", headers)).status_code == 401
    assert (await prefill.post(path, body, headers)).status_code == 200
    assert (await prefill.post(path, body, headers)).status_code == 401
    assert AUTH_HEADER in headers


async def test_a_restarted_instance_refuses_what_was_signed_for_its_old_life(
    prefill: Prefill, client: AskClient
) -> None:
    with pytest.raises(AskFailed) as caught:
        await client.ask(prefill.url, "an older epoch", ASK, 5)
    assert caught.value.reason == "unauthorized"


async def test_a_body_over_the_limit_is_refused_while_it_is_read(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 1000)
    response = await prefill.post("/pd/prefill", b"x" * 2000, {})
    assert response.status_code == 413
    assert MAX_BODY_BYTES > 1000


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"transfer_id": "t", "token_ids": ["a"]}', b"\x80\x04K\x01."])
async def test_a_malformed_ask_is_a_client_error(prefill: Prefill, body: bytes) -> None:
    """F72: a pickle is only bytes that are not JSON."""
    headers = sign_request(SECRET, "POST", "/pd/prefill", body, EPOCH)
    response = await prefill.post("/pd/prefill", body, headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "pd_prefill_refused"


async def test_an_empty_prompt_is_a_client_error(prefill: Prefill, client: AskClient) -> None:
    with pytest.raises(AskFailed) as caught:
        await client.ask(prefill.url, EPOCH, PrefillAsk(transfer_id="t", token_ids=[]), 5)
    assert (caught.value.reason, caught.value.is_final) == ("rejected", True)


async def test_a_prefill_without_a_lease_is_busy(prefill: Prefill, client: AskClient) -> None:
    prefill.engine.params = {}
    with pytest.raises(AskFailed, match="no KV could be leased") as caught:
        await client.ask(prefill.url, EPOCH, ASK, 5)
    assert caught.value.reason == "busy"


async def test_the_same_transfer_is_not_computed_twice_at_once(prefill: Prefill, client: AskClient) -> None:
    prefill.engine.gate.clear()
    first = asyncio.ensure_future(client.ask(prefill.url, EPOCH, ASK, 5))
    await until(lambda: prefill.engine.calls)
    with pytest.raises(AskFailed, match="being computed"):
        await client.ask(prefill.url, EPOCH, ASK, 5)
    prefill.engine.gate.set()
    await first
    assert len(prefill.engine.calls) == 1


async def test_cancelling_an_ask_aborts_the_prefill(prefill: Prefill, client: AskClient) -> None:
    prefill.engine.gate.clear()
    task = asyncio.ensure_future(client.ask(prefill.url, EPOCH, ASK, 5))
    await until(lambda: prefill.engine.calls)
    task.cancel()
    await until(lambda: prefill.engine.num_aborted)
    await until(lambda: prefill.server.to_status() == {"prefills_in_flight": 0})


async def test_a_named_cancel_aborts_the_prefill_and_tells_the_engine_core(prefill: Prefill, client: AskClient) -> None:
    prefill.engine.gate.clear()
    task = asyncio.ensure_future(client.ask(prefill.url, EPOCH, ASK, 5))
    await until(lambda: prefill.engine.calls)
    assert await client.cancel(prefill.url, EPOCH, ASK.transfer_id)
    with pytest.raises(AskFailed, match="was cancelled"):
        await task
    assert prefill.engine.num_aborted == 1
    assert prefill.core.messages == [CancelTransfer(transfer_id=ASK.transfer_id)]


async def test_an_ask_that_comes_after_its_cancel_computes_nothing(prefill: Prefill, client: AskClient) -> None:
    await client.cancel(prefill.url, EPOCH, ASK.transfer_id)
    with pytest.raises(AskFailed, match="cancelled before it came"):
        await client.ask(prefill.url, EPOCH, ASK, 5)
    assert not prefill.engine.calls


async def test_a_slow_prefill_is_a_timeout(prefill: Prefill, client: AskClient) -> None:
    prefill.engine.gate.clear()
    with pytest.raises(AskFailed) as caught:
        await client.ask(prefill.url, EPOCH, ASK, 0.1)
    assert caught.value.reason == "timeout"
    await until(lambda: prefill.engine.num_aborted)


async def test_nobody_there_is_unreachable_and_named(client: AskClient, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(AskFailed, match=url) as caught:
        await client.get_peer(url)
    assert caught.value.reason == "unreachable"


async def test_a_server_without_our_endpoints_is_not_a_prefill_instance(client: AskClient, prefill: Prefill) -> None:
    with pytest.raises(AskFailed, match="--pd-role prefill") as caught:
        await client.get_peer(prefill.url + "/elsewhere")
    assert caught.value.reason == "not_prefill"


async def test_a_dead_engine_core_makes_peer_facts_unavailable(prefill: Prefill, client: AskClient) -> None:
    prefill.core.answers = [unreachable()]
    with pytest.raises(AskFailed, match=r"core\.sock") as caught:
        await client.get_peer(prefill.url)
    assert caught.value.reason == "busy"


async def test_status_joins_the_engine_core_s_part_with_the_api_server_s(prefill: Prefill) -> None:
    prefill.core.answers = [STATUS]
    found = (await prefill.get("/pd/status")).json()
    assert (found["role"], found["engine_id"], found["epoch"]) == ("prefill", "pd-d", EPOCH)
    assert found["leases"] == {"held": 0}
    assert found["api_server"]["prefills_in_flight"] == 0


async def test_status_says_that_the_engine_core_is_silent(prefill: Prefill) -> None:
    prefill.core.answers = [unreachable()]
    response = await prefill.get("/pd/status")
    assert response.status_code == 503
    assert "core.sock" in response.json()["engine_core"]


def test_probes_stay_out_of_the_access_log() -> None:
    def record(path: str) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.access", 20, "", 0, "%s", ("127.0.0.1", "GET", path, "1.1", 200), None)

    assert not routes._is_no_probe(record("/pd/peer"))
    assert routes._is_no_probe(record("/pd/prefill"))
    assert routes._is_no_probe(record("/v1/completions"))


async def test_without_a_role_the_endpoints_say_so(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_instances", {prefill.engine: None})
    response = await prefill.get("/pd/status")
    assert response.status_code == 404
    assert "--pd-role" in response.json()["error"]["message"]


async def test_health_is_silent_when_all_threads_live(prefill: Prefill) -> None:
    request = SimpleNamespace(app=prefill.app)
    prefill.core.answers = [HealthReply()]
    assert await hooks.get_health_problem(request) is None
    prefill.core.answers = [HealthReply(problems=("thread pd-control has died",))]
    response = await hooks.get_health_problem(request)
    assert response.status_code == 503
    assert b"thread pd-control has died" in response.body
    prefill.core.answers = [unreachable()]
    assert (await hooks.get_health_problem(request)).status_code == 503
    gc.collect()
