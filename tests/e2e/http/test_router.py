# SPDX-License-Identifier: Apache-2.0
"""The two-phase protocol over HTTP: by hand, and by vllm-router from the package index, unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.builders import prompt
from tests.e2e.http.conftest import Deployment
from tests.e2e.http.servers import Server, start_router
from tests.e2e.http.test_front_door import body, complete, num_granted, num_held, wait_for

pytestmark = [pytest.mark.http, pytest.mark.timeout(120)]
ROUTER_START_S = 60.0


@pytest.fixture(scope="module", params=["bare", "front"])
def decode(request: pytest.FixtureRequest, deployment: Deployment) -> Server:
    """A decode server without --pd-prefill, and one that would also ask by itself."""
    server: Server = getattr(deployment, request.param)
    return server


@pytest.fixture(scope="module")
def router(deployment: Deployment, decode: Server) -> Iterator[Server]:
    process = start_router(deployment.folder, deployment.prefill, [decode])
    try:
        process.wait_healthy(time.monotonic() + ROUTER_START_S)
        yield process
    finally:
        process.kill()


def test_both_legs_by_hand(deployment: Deployment, decode: Server):
    tokens = prompt(101, seed=1)
    before = decode.status()["totals"]["tokens"]
    first = body(tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params = deployment.prefill[0].post("/v1/completions", first).json["kv_transfer_params"]
    assert params["do_remote_prefill"]
    for key in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"):
        assert key in params
    answer = decode.post("/v1/completions", body(tokens, kv_transfer_params=params)).json
    assert answer["choices"][0]["token_ids"] == complete(deployment.aggregated, tokens)[0]
    assert decode.status()["totals"]["tokens"] - before == 100
    wait_for(lambda: num_held(deployment) == 0, "no lease held")


def test_completions_through_the_router_load_their_kv_remotely(deployment: Deployment, decode: Server, router: Server):
    before, granted = decode.status()["totals"]["tokens"], num_granted(deployment)
    lengths = [33, 64, 101, 200]
    prompts = [prompt(length, seed=100 + length) for length in lengths]
    for tokens in prompts:
        assert complete(router, tokens) == complete(deployment.aggregated, tokens)
    assert decode.status()["totals"]["tokens"] - before == sum(lengths) - len(lengths)
    assert num_granted(deployment) - granted == len(lengths)
    wait_for(lambda: num_held(deployment) == 0, "no lease held")


def test_chat_and_streams_through_the_router(deployment: Deployment, decode: Server, router: Server):
    chat = {
        "model": "tiny", "max_tokens": 8, "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France? " * 3}],
    }  # fmt: skip
    before = decode.status()["totals"]["tokens"]
    contents = [
        server.post("/v1/chat/completions", chat).json["choices"][0]["message"]["content"]
        for server in (router, deployment.aggregated)
    ]
    assert contents[0] == contents[1]
    texts = [
        "".join(event["choices"][0]["text"] for event in server.stream("/v1/completions", body(prompt(90, seed=2))))
        for server in (router, deployment.aggregated)
    ]
    assert texts[0] == texts[1]
    assert decode.status()["totals"]["tokens"] - before > 89


def test_eight_concurrent_requests_through_the_router(deployment: Deployment, router: Server):
    prompts = [prompt(30 + 21 * number, seed=300 + number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda tokens: complete(router, tokens), prompts))
    assert answers == [complete(deployment.aggregated, tokens) for tokens in prompts]
    wait_for(lambda: num_held(deployment) == 0, "no lease held")
