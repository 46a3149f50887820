# SPDX-License-Identifier: Apache-2.0
"""`vllm pd drain` against real servers: nothing that runs is lost, new requests go elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.builders import prompt
from tests.e2e.http.conftest import Deployment
from tests.e2e.http.servers import Server
from tests.e2e.http.test_front_door import body, complete, wait_for
from vllm_ascend_pd.up.cli import main

pytestmark = [pytest.mark.http, pytest.mark.timeout(120)]
PROBED_S = 15.0  # decode asks every prefill instance for its state every 5 s


@contextmanager
def drained(deployment: Deployment, server: Server, *options: str) -> Iterator[int]:
    """The command's exit code; undone afterwards, until everybody has seen it."""
    command = ["drain", server.url, "--pd-secret-file", str(deployment.secret_file)]
    try:
        yield main([*command, *options])
    finally:
        assert main([*command, "--undo"]) == 0
        wait_for(lambda: states(deployment) == {"healthy"}, "the pool is healthy", PROBED_S)


def states(deployment: Deployment) -> set[str]:
    """Of the prefill instances, as both API servers of the front see them."""
    seen: set[str] = set()
    for _ in range(20):
        seen |= {member["state"] for member in deployment.front.status()["api_server"]["pool"]}
    return seen


def granted(server: Server) -> int:
    return int(server.status()["totals"]["leases_granted"])


def test_requests_go_to_the_other_prefill_server_from_the_first_one_on(deployment: Deployment):
    left, other = deployment.prefill
    with drained(deployment, left) as code:
        assert code == 0
        before = granted(left), granted(other)
        prompts = [prompt(60, seed=seed) for seed in range(700, 706)]
        for tokens in prompts:  # at once: the pool has not been told yet
            assert complete(deployment.front, tokens) == complete(deployment.aggregated, tokens)
        assert (granted(left), granted(other)) == (before[0], before[1] + len(prompts))
        wait_for(lambda: "draining" in states(deployment), "the front has seen it", PROBED_S)
        assert left.get("/health").status == 200
        assert left.status()["draining"] is True


def test_a_stream_that_runs_is_finished_and_every_api_server_refuses_new_requests(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
):
    tokens = prompt(40, seed=720)
    stream = deployment.front.stream("/v1/completions", body(tokens, max_tokens=400))
    received = next(stream)["choices"][0]["token_ids"]
    with drained(deployment, deployment.front, "--timeout", "0") as code:
        assert code == 0
        refused = [deployment.front.post("/v1/completions", body(prompt(8, seed=721))) for _ in range(12)]
        assert {answer.status for answer in refused} == {503}
        assert {answer.json["error"]["type"] for answer in refused} == {"pd_draining"}
        for event in stream:
            received += event["choices"][0]["token_ids"]
        assert [received] == complete(deployment.aggregated, tokens, max_tokens=400)
        assert main(["drain", deployment.front.url, "--pd-secret-file", str(deployment.secret_file)]) == 0
    assert "is drained" in capsys.readouterr().out
    answer: Any = complete(deployment.front, tokens)
    assert answer == complete(deployment.aggregated, tokens)


def test_a_stranger_drains_nobody(deployment: Deployment, tmp_path, capsys: pytest.CaptureFixture[str]):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("f" * 64)
    assert main(["drain", deployment.front.url, "--pd-secret-file", str(secret)]) == 1
    assert "give the --pd-secret-file that the instance was started with" in capsys.readouterr().err
    assert deployment.front.status()["draining"] is False


def test_what_is_left_is_counted_by_the_engine_core(deployment: Deployment):
    stream = deployment.front.stream("/v1/completions", body(prompt(40, seed=730), max_tokens=400))
    next(stream)
    assert deployment.front.status()["requests"]["unfinished"] == 1
    list(stream)
    wait_for(lambda: deployment.front.status()["requests"]["unfinished"] == 0, "no request is left")
