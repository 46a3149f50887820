# SPDX-License-Identifier: Apache-2.0
"""A client's requests through the decode side's front door, against the aggregated server."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.builders import prompt
from tests.e2e.http.conftest import Deployment
from tests.e2e.http.servers import MAX_MODEL_LEN, Server

pytestmark = [pytest.mark.http, pytest.mark.timeout(120)]
LOADED = "vllm:pd_loaded_tokens_total{}"
NUM_TOKENS = 12


def body(tokens: list[int], **more: Any) -> dict[str, Any]:
    """A completion of token ids, greedy, with the answer's token ids."""
    fixed = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": tokens, **fixed, **more}


def complete(server: Server, tokens: list[int], **more: Any) -> list[list[int]]:
    """The token ids of every choice."""
    answer = server.post("/v1/completions", body(tokens, **more))
    assert answer.status == 200, answer.text
    return [choice["token_ids"] for choice in answer.json["choices"]]


def wait_for(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def num_held(deployment: Deployment) -> int:
    """Leases that the prefill servers hold."""
    return sum(server.status()["leases"]["held"] for server in deployment.prefill)


def num_granted(deployment: Deployment) -> int:
    """Leases granted since start."""
    return sum(server.status()["totals"]["leases_granted"] for server in deployment.prefill)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 101, 200])
def test_a_completion_is_the_aggregated_one_and_its_kv_came_from_a_prefill_server(deployment: Deployment, length: int):
    tokens = prompt(length, seed=length)
    before = deployment.front.status()["totals"]["tokens"]
    assert complete(deployment.front, tokens) == complete(deployment.aggregated, tokens)
    wait_for(lambda: num_held(deployment) == 0, "no lease held")
    assert deployment.front.status()["totals"]["tokens"] - before == length - 1


def test_text_completions_and_usage_are_the_aggregated_ones(deployment: Deployment):
    text = "What is the largest animal in the world? " * 3
    answers = [
        server.post("/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 9, "temperature": 0}).json
        for server in (deployment.front, deployment.aggregated)
    ]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answers[0]["usage"][count] == answers[1]["usage"][count]


def test_a_chat_is_the_aggregated_one(deployment: Deployment):
    messages = [{"role": "user", "content": "Tell me about the city of Paris and its river."}]
    request = {"model": "tiny", "messages": messages, "max_tokens": 10, "temperature": 0}
    before = num_granted(deployment)
    front, aggregated = (
        server.post("/v1/chat/completions", request).json["choices"][0]
        for server in (deployment.front, deployment.aggregated)
    )
    assert front["message"]["content"] == aggregated["message"]["content"]
    assert front["finish_reason"] == aggregated["finish_reason"]
    assert num_granted(deployment) == before + 1


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_adds_up_to_the_aggregated_one(deployment: Deployment, kind: str):
    if kind == "completion":
        path, request = "/v1/completions", body(prompt(77, seed=5))
    else:
        path = "/v1/chat/completions"
        request = {
            "model": "tiny",
            "max_tokens": 8,
            "temperature": 0,
            "messages": [{"role": "user", "content": "Hi " * 30}],
        }
    request |= {"stream_options": {"include_usage": True}}

    def collect(server: Server) -> tuple[str, list[str], int]:
        """Text, finish reasons, tokens; how tokens are spread over events depends on the load."""
        text, reasons, num_tokens = "", [], 0
        for event in server.stream(path, request):
            for choice in event["choices"]:
                text += choice["text"] if kind == "completion" else choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        return text, reasons, num_tokens

    before = num_granted(deployment)
    streamed = collect(deployment.front)
    assert streamed == collect(deployment.aggregated)
    assert streamed[1:] == (["length"], request["max_tokens"])
    assert num_granted(deployment) == before + 1


def test_sixteen_concurrent_clients_get_the_aggregated_answers_and_both_prefill_servers_work(deployment: Deployment):
    prompts = [prompt(20 + 13 * number, seed=900 + number) for number in range(16)]
    before = [server.status()["totals"]["leases_granted"] for server in deployment.prefill]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda tokens: complete(deployment.front, tokens), prompts))
    assert answers == [complete(deployment.aggregated, tokens) for tokens in prompts]
    after = [server.status()["totals"]["leases_granted"] for server in deployment.prefill]
    granted = [a - b for a, b in zip(after, before, strict=True)]
    assert sum(granted) == 16
    assert min(granted) > 0  # prefix affinity spreads unlike prompts
    wait_for(lambda: num_held(deployment) == 0, "no lease held")


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("n>1", {"n": 2, "temperature": 0.8, "seed": 5}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("prompt_logprobs", {"echo": True, "logprobs": 1}),
    ],
    ids=["n", "prompt_logprobs", "echo with logprobs"],
)
def test_what_pd_does_not_carry_is_served_by_the_front_alone_and_counted(
    deployment: Deployment, reason: str, more: dict[str, Any]
):
    key = f"vllm:pd_remote_kv_fallback_total{{reason={reason}}}"
    before, granted = deployment.front.metrics().get(key, 0), num_granted(deployment)
    tokens = prompt(40, seed=6)
    answers = [
        server.post("/v1/completions", body(tokens, **more)).json["choices"]
        for server in (deployment.front, deployment.aggregated)
    ]
    assert [c["token_ids"] for c in answers[0]] == [c["token_ids"] for c in answers[1]]
    assert deployment.front.metrics()[key] == before + 1
    assert num_granted(deployment) == granted


def test_f07_an_over_long_prompt_is_a_client_error_and_nothing_moves(deployment: Deployment):
    granted, moved = num_granted(deployment), deployment.front.status()["totals"]["tokens"]
    answer = deployment.front.post("/v1/completions", body(prompt(MAX_MODEL_LEN + 80, seed=7)))
    assert 400 <= answer.status < 500
    assert str(MAX_MODEL_LEN) in answer.json["error"]["message"]
    assert (num_granted(deployment), deployment.front.status()["totals"]["tokens"]) == (granted, moved)


def test_f50_a_client_that_disconnects_leaves_no_lease_and_no_request(deployment: Deployment):
    """At any point: while P computes, while D pulls, while D decodes."""
    for number in range(20):
        connection = http.client.HTTPConnection("127.0.0.1", deployment.front.port, timeout=30)
        request = body(prompt(300, seed=2000 + number), max_tokens=200)
        connection.request("POST", "/v1/completions", json.dumps(request), {"content-type": "application/json"})
        time.sleep(0.005 * number)
        connection.close()
    wait_for(lambda: num_held(deployment) == 0, "no lease held")

    def is_idle() -> bool:
        status = deployment.front.status()
        return not any(status["transfers_in_flight"].values())

    wait_for(is_idle, "no transfer in flight on the decode side")
    running = ("vllm:num_requests_running{}", "vllm:num_requests_waiting{}")
    for server in (deployment.front, *deployment.prefill):
        wait_for(lambda server=server: not any(server.metrics().get(k, 0) for k in running), f"{server.name} idle")
    free = [server.status()["blocks"] for server in (deployment.front, *deployment.prefill)]
    assert all(blocks["free"] == blocks["total"] - 1 for blocks in free), free
    tokens = prompt(50, seed=8)
    assert complete(deployment.front, tokens) == complete(deployment.aggregated, tokens)
