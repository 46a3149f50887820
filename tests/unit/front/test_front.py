# SPDX-License-Identifier: Apache-2.0
"""The front door: who gets remote KV, who does not and why, and what the engine core is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.unit.front.fakes import LOADED, World, make_handoff, make_request
from vllm_ascend_pd.errors import PDKVUnavailable
from vllm_ascend_pd.front.front import PDWrongRole, clear_unsupported_decode
from vllm_ascend_pd.wire import LoadResult

MakeWorld = Callable[..., World]


def params_of(request: Any) -> Any:
    return (request.sampling_params.extra_args or {}).get("kv_transfer_params")


def brought(handoff: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"do_remote_prefill": True, "pd_handoff": msgspec.to_builtins(handoff)}}


def real_handoff(transfer_id: str, **values: Any) -> Any:
    return msgspec.structs.replace(make_handoff(transfer_id, **values), prompt_digest="d" * 64)


@pytest.fixture(autouse=True)
def _unchecked_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ascend_pd.handoff._check_values", lambda handoff: None)


async def test_a_plain_request_is_marked_and_asked_for(make_world: MakeWorld) -> None:
    world, request = make_world(), make_request(extra_args={"mine": 1})
    world.core.answers = [LOADED]
    world.front.wrap_request(request)
    assert params_of(request) == {
        "do_remote_prefill": True,
        "pd_transfer_id": "pd-d/e0/r1/0",
        "pd_wait": True,
        "pd_deadline_ms": 5000,
    }
    assert request.sampling_params.extra_args["mine"] == 1
    assert world.front.num_asks == 1
    await world.settle()
    assert world.metrics.paths == ["remote"]
    assert world.front.num_asks == 0


FALLBACKS = [
    ({"n": 2}, "n>1"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"mm_features": [object()]}, "multimodal"),
    ({"lora_request": object()}, "lora"),
    ({"prompt_embeds": object()}, "prompt_embeds"),
    ({"prompt_token_ids": None}, "prompt_embeds"),
    ({"sampling_params": None}, "pooling"),
    ({"resumable": True}, "streaming_input"),
]


@pytest.mark.parametrize(("change", "reason"), FALLBACKS, ids=[reason for _, reason in FALLBACKS])
async def test_what_pd_does_not_carry_is_served_here_and_counted(
    make_world: MakeWorld, change: dict[str, Any], reason: str
) -> None:
    world, request = make_world(), make_request(**change)
    world.front.wrap_request(request)
    await world.settle()
    assert not world.asker.asks
    assert (world.metrics.fallbacks, world.metrics.paths) == ([reason], ["local"])
    assert request.sampling_params is None or params_of(request) is None


@pytest.mark.parametrize(("change", "reason"), FALLBACKS, ids=[reason for _, reason in FALLBACKS])
async def test_strict_mode_refuses_what_pd_does_not_carry(
    make_world: MakeWorld, change: dict[str, Any], reason: str
) -> None:
    world = make_world(require_remote_kv=True)
    with pytest.raises(PDKVUnavailable, match=reason):
        world.front.wrap_request(make_request(**change))
    assert world.metrics.fallbacks == [reason]


async def test_a_router_that_drops_the_parameters_is_noticed(make_world: MakeWorld) -> None:
    """F66: counted, and an error in strict mode."""
    world, request = make_world(prefill_urls=()), make_request()
    world.front.wrap_request(request)
    assert world.metrics.fallbacks == ["no_handoff"]
    with pytest.raises(PDKVUnavailable, match="no_handoff"):
        make_world(prefill_urls=(), require_remote_kv=True).front.wrap_request(make_request())


async def test_with_no_healthy_instance_the_request_does_not_wait(make_world: MakeWorld) -> None:
    world, request = make_world(), make_request()
    for member in world.pool.members:
        world.pool.mark_dead(member, "no")
    world.front.wrap_request(request)
    assert params_of(request) is None
    assert world.metrics.fallbacks == ["no_prefill_instance"]


async def test_with_no_healthy_instance_and_policy_fail_it_is_an_error(make_world: MakeWorld) -> None:
    world = make_world(load_failure="fail")
    for member in world.pool.members:
        world.pool.mark_dead(member, "no")
    with pytest.raises(PDKVUnavailable, match="no_prefill_instance"):
        world.front.wrap_request(make_request())


async def test_a_handoff_in_the_request_is_delivered(make_world: MakeWorld) -> None:
    world = make_world(prefill_urls=())
    request = make_request(extra_args=brought(real_handoff("theirs")))
    world.core.answers = [LOADED]
    world.front.wrap_request(request)
    assert params_of(request)["pd_transfer_id"] == "theirs"
    assert "pd_handoff" not in params_of(request)
    await world.settle()
    assert world.core.kinds == ["DeliverHandoff"]
    assert world.metrics.paths == ["remote"]


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1, "remote_block_ids": [[1]]},
        {"do_remote_prefill": True, "pd_handoff": "x"},
        {"do_remote_prefill": True, "pd_handoff": {"host": "evil"}},
        brought(real_handoff("t", signature="forged"))["kv_transfer_params"],
    ],
    ids=["unsigned", "not an object", "incomplete", "forged"],
)
async def test_a_client_s_own_address_is_never_dialled(make_world: MakeWorld, params: dict[str, Any]) -> None:
    """I16: computed here instead, and counted."""
    world, request = make_world(prefill_urls=()), make_request(extra_args={"kv_transfer_params": params})
    world.front.wrap_request(request)
    await world.settle()
    assert params_of(request) is None
    assert not world.core.messages
    assert world.metrics.fallbacks == ["bad_handoff"]


async def test_after_a_forged_handoff_our_own_pool_is_asked(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [LOADED]
    request = make_request(extra_args=brought(real_handoff("t", signature="forged")))
    world.front.wrap_request(request)
    await world.settle()
    assert [ask.transfer_id for _, _, ask in world.asker.asks] == ["pd-d/e0/r1/0"]
    assert world.metrics.failures == ["bad_handoff"]


async def test_a_client_cannot_make_a_request_wait_for_nothing(make_world: MakeWorld) -> None:
    """Marks of our own protocol in a client's request are dropped."""
    world = make_world(prefill_urls=())
    request = make_request(extra_args={"kv_transfer_params": {"pd_wait": True, "pd_transfer_id": "x"}})
    world.front.wrap_request(request)
    assert params_of(request) is None


async def test_a_prefill_request_at_a_decode_instance_is_a_client_error(make_world: MakeWorld) -> None:
    request = make_request(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    with pytest.raises(PDWrongRole) as caught:
        make_world().front.wrap_request(request)
    assert caught.value.http_status == 400


async def test_a_request_rejected_by_admission_control_is_not_asked_for(make_world: MakeWorld) -> None:
    world = make_world()
    world.engine.rejected.add("r1")
    world.front.wrap_request(make_request())
    await world.settle()
    assert not world.asker.asks
    assert not world.core.messages


async def test_a_failed_request_gets_its_error_and_ends(make_world: MakeWorld) -> None:
    world = make_world(load_failure="fail")
    world.core.answers = [LoadResult(outcome="failed", reason="lease")]
    world.front.wrap_request(make_request())
    await world.settle()
    assert isinstance(world.engine.failed["r1"], PDKVUnavailable)


async def test_an_abort_stops_only_its_own_ask(make_world: MakeWorld) -> None:
    world = make_world()
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [asyncio.Event(), asyncio.Event()]
    world.front.wrap_request(make_request("r1"))
    world.front.wrap_request(make_request("r2"))
    await world.settle()
    world.front.forget(["r1", "unknown"])
    await world.settle()
    assert world.front.num_asks == 1
    assert [transfer_id for _, _, transfer_id in world.asker.cancels] == ["pd-d/e0/r1/0"]


async def test_an_abort_by_the_ask_itself_does_not_cut_it_short(make_world: MakeWorld) -> None:
    """Failing a request aborts it in the engine client, which tells the front."""
    world = make_world(load_failure="fail")
    world.core.answers = [LoadResult(outcome="failed", reason="lease")]
    ended: list[str] = []

    async def fail(request_id: str, error: Exception) -> None:
        world.front.forget([request_id])
        await asyncio.sleep(0)
        ended.append(request_id)

    world.engine.fail = fail  # type: ignore[method-assign,assignment]
    world.front.wrap_request(make_request())
    await world.settle()
    assert ended == ["r1"]


def test_status_lists_every_member_and_what_waits(make_world: MakeWorld) -> None:
    status = make_world().front.to_status()
    assert status["waiting_for_kv"] == 0
    assert [(member["url"], member["state"]) for member in status["pool"]] == [
        ("http://p1:1", "healthy"),
        ("http://p2:2", "healthy"),
    ]


@pytest.mark.parametrize("change", [{"n": 2}, {"prompt_logprobs": 1}, {"mm_features": [object()]}])
def test_a_prefill_instance_keeps_no_kv_that_the_decode_side_will_not_load(change: dict[str, Any]) -> None:
    request = make_request(extra_args={"kv_transfer_params": {"do_remote_decode": True}}, **change)
    clear_unsupported_decode(request)
    assert params_of(request) is None


def test_a_plain_two_phase_prefill_keeps_its_parameters() -> None:
    request = make_request(extra_args={"kv_transfer_params": {"do_remote_decode": True, "x": 1}})
    clear_unsupported_decode(request)
    assert params_of(request) == {"do_remote_decode": True, "x": 1}


def test_a_decode_request_at_a_prefill_instance_is_a_client_error() -> None:
    with pytest.raises(PDWrongRole):
        clear_unsupported_decode(make_request(extra_args={"kv_transfer_params": {"do_remote_prefill": True}}))
