# SPDX-License-Identifier: Apache-2.0
"""/pd/status, /health, metrics, and what is refused over HTTP."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest

from tests.builders import prompt
from tests.e2e.http.conftest import Deployment
from tests.e2e.http.servers import Server
from tests.e2e.http.test_front_door import body, complete, num_granted

pytestmark = [pytest.mark.http, pytest.mark.timeout(120)]

DECODE_METRICS = (
    "vllm:pd_transfers", "vllm:pd_transfer_bytes", "vllm:pd_loaded_tokens", "vllm:pd_load_failures",
    "vllm:pd_stage_seconds", "vllm:pd_remote_kv_fallback", "vllm:pd_requests", "vllm:pd_ask_seconds",
)  # fmt: skip
PREFILL_METRICS = ("vllm:pd_leases_granted", "vllm:pd_leases_released", "vllm:pd_leases_expired")


def test_status_of_the_decode_side_names_its_peers_and_totals(deployment: Deployment):
    complete(deployment.front, prompt(60, seed=1))
    status = deployment.front.status()
    assert status["role"] == "decode"
    assert status["totals"]["tokens"] > 0
    assert status["totals"]["bytes"] > 0
    pool = {member["url"]: member["state"] for member in status["api_server"]["pool"]}
    assert pool == {server.url: "healthy" for server in deployment.prefill}
    ids = {server.status()["engine_id"] for server in deployment.prefill}
    assert {peer["engine_id"] for peer in status["peers"]} == ids
    assert set(status["transfers_in_flight"]) >= {"expected", "pulling"}
    assert status["links"], "which data links exist is a part of the status (DESIGN §8)"


def test_status_of_the_prefill_side_counts_leases(deployment: Deployment):
    complete(deployment.front, prompt(61, seed=2))
    statuses = [server.status() for server in deployment.prefill]
    assert {status["role"] for status in statuses} == {"prefill"}
    assert sum(status["totals"]["leases_released"] for status in statuses) > 0
    assert all(status["leases"]["held"] == 0 for status in statuses)
    decode_id = deployment.front.status()["engine_id"]
    assert all(decode_id in {peer["engine_id"] for peer in status["peers"]} for status in statuses)


def test_status_and_health_are_right_whichever_api_server_answers(deployment: Deployment):
    """The front has two API server processes; each connection may reach another."""
    statuses = [deployment.front.status() for _ in range(30)]
    assert len({status["api_server"]["pid"] for status in statuses}) == 2
    assert len({(s["engine_id"], s["epoch"], s["totals"]["tokens"]) for s in statuses}) == 1
    assert all(len(s["api_server"]["pool"]) == 2 for s in statuses)
    assert {deployment.front.get("/health").status for _ in range(10)} == {200}


def test_health_is_200_on_every_server(deployment: Deployment):
    assert [server.get("/health").status for server in deployment.all] == [200] * 5


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_metrics_exist_with_help_texts(deployment: Deployment, role: str):
    complete(deployment.front, prompt(62, seed=3))
    # With several API server processes prometheus_client shows only what has been counted.
    server = deployment.bare if role == "decode" else deployment.prefill[0]
    text = server.get("/metrics").text
    for name in DECODE_METRICS if role == "decode" else PREFILL_METRICS:
        lines = [line for line in text.splitlines() if line.startswith((f"# HELP {name} ", f"# HELP {name}_total "))]
        assert lines, f"{name} has no help text"
        assert len(lines[0].split(maxsplit=3)[3]) > 15


def test_metrics_count_what_was_moved(deployment: Deployment):
    before = deployment.front.metrics()
    complete(deployment.front, prompt(130, seed=4))
    after = deployment.front.metrics()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("vllm:pd_loaded_tokens_total{}") == 129
    assert grew("vllm:pd_transfers_total{}") == 1
    assert grew("vllm:pd_transfer_bytes_total{}") == 5 * (16 << 10) * 4  # five blocks of four layers
    assert grew("vllm:pd_requests_total{path=remote}") == 1
    assert grew("vllm:pd_stage_seconds_count{stage=pull}") == 1


def test_an_aggregated_server_says_that_pd_is_off(deployment: Deployment):
    assert deployment.aggregated.get("/pd/status").status == 404


@pytest.mark.parametrize("path", ["/pd/prefill", "/pd/cancel"])
@pytest.mark.parametrize("headers", [{}, {"x-vllm-pd-auth": "v1 " + "0" * 32 + " " + "0" * 64}], ids=["none", "wrong"])
def test_an_unsigned_ask_is_refused_before_anything_is_computed(deployment: Deployment, path: str, headers: dict):
    granted = num_granted(deployment)
    ask = {"transfer_id": "x", "token_ids": prompt(40, seed=5)}
    answer = deployment.prefill[0].post(path, ask, headers=headers)
    assert answer.status in (401, 403)
    assert num_granted(deployment) == granted


def test_an_ask_to_a_decode_server_is_refused(deployment: Deployment):
    answer = deployment.front.post("/pd/prefill", {"transfer_id": "x", "token_ids": [1]})
    assert answer.status == 404
    assert "decode" in answer.json["error"]["message"]


def test_a_request_of_the_other_role_is_refused_by_name(deployment: Deployment):
    wrong = deployment.front.post("/v1/completions", body([1, 2, 3], kv_transfer_params={"do_remote_decode": True}))
    assert (wrong.status, "decode" in wrong.text) == (400, True)
    wrong = deployment.prefill[0].post(
        "/v1/completions", body([1, 2, 3], kv_transfer_params={"do_remote_prefill": True})
    )
    assert (wrong.status, "prefill" in wrong.text) == (400, True)


def test_f66_in_strict_mode_a_request_without_a_handoff_is_an_error(deployment: Deployment):
    before = deployment.bare.metrics().get("vllm:pd_remote_kv_fallback_total{reason=no_handoff}", 0)
    answer = deployment.bare.post("/v1/completions", body(prompt(40, seed=6)))
    assert answer.status == 503
    assert "pd_kv_unavailable" in json.dumps(answer.json)
    assert deployment.bare.metrics()["vllm:pd_remote_kv_fallback_total{reason=no_handoff}"] == before + 1
    code, events = streamed(deployment.bare, body(prompt(40, seed=6)))
    assert (code, len(events)) in ((503, 0), (200, 1))  # in the second case an event, as the 200 was out
    for event in events:
        assert "pd_kv_unavailable" in json.dumps(event["error"])


def streamed(server: Server, request: dict[str, Any]) -> tuple[int, list[Any]]:
    """Status and events."""
    try:
        return 200, list(server.stream("/v1/completions", request))
    except urllib.error.HTTPError as error:
        return error.code, []


def test_f66_in_strict_mode_a_forged_handoff_is_an_error(deployment: Deployment):
    tokens = prompt(45, seed=7)
    first = body(tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params = deployment.prefill[0].post("/v1/completions", first).json["kv_transfer_params"]
    forged = {**params, "pd_handoff": {**params["pd_handoff"], "num_tokens": 44}}
    answer = deployment.bare.post("/v1/completions", body(tokens, kv_transfer_params=forged))
    assert answer.status == 503
    right = deployment.bare.post("/v1/completions", body(tokens, kv_transfer_params=params))
    assert right.json["choices"][0]["token_ids"] == complete(deployment.aggregated, tokens)[0]
