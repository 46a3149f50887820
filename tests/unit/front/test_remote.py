# SPDX-License-Identifier: Apache-2.0
"""One request's way to remote KV: attempts, policies, deadline, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.front.fakes import LOADED, World, make_handoff, unreachable
from vllm_ascend_pd.errors import PDDeadline, PDKVUnavailable
from vllm_ascend_pd.front.ask import AskFailed
from vllm_ascend_pd.front.pool import GIVE_UP_FAILURES, MemberState
from vllm_ascend_pd.front.remote import MAX_ATTEMPTS, Ending, Prompt, RemotePrefill, label
from vllm_ascend_pd.wire import ComputeLocally, DeliverHandoff, LoadResult, Refused

PROMPT = Prompt(request_id="r1", token_ids=[1, 2, 3, 4], cache_salt="salt", priority=3)
MakeWorld = Callable[..., World]


def failed(reason: str = "lease") -> LoadResult:
    return LoadResult(outcome="failed", reason=reason)


async def run(world: World, **values: Any) -> Ending:
    ending = await RemotePrefill(world.services, PROMPT, **values).run()
    await world.settle()
    return ending


async def test_ask_then_deliver_is_all_there_is_when_nothing_fails(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [LOADED]
    assert await run(world) == Ending("remote")
    ((_, epoch, ask),) = world.asker.asks
    assert epoch == "e1"
    assert (ask.token_ids, ask.cache_salt, ask.priority) == ([1, 2, 3, 4], "salt", 3)
    (message,) = world.core.messages
    assert isinstance(message, DeliverHandoff)
    assert (message.request_id, message.handoff.transfer_id) == ("r1", ask.transfer_id)
    assert 0 < message.deadline_ms <= 5000
    assert (world.metrics.paths, world.metrics.fallbacks, world.metrics.num_answers) == (["remote"], [], 1)
    assert not world.asker.cancels


async def test_each_attempt_has_its_own_transfer_id(make_world: MakeWorld) -> None:
    """I6: the id carries an attempt number and is unlike the request's."""
    world = make_world()
    world.core.answers = [failed(), failed(), LOADED]
    assert (await run(world)).path == "remote"
    ids = [ask.transfer_id for _, _, ask in world.asker.asks]
    assert ids == [f"pd-d/e0/r1/{attempt}" for attempt in range(3)]


async def test_reprefill_asks_another_instance_first(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [failed(), LOADED]
    await run(world)
    assert set(world.asker.urls) == {"http://p1:1", "http://p2:2"}


async def test_reprefill_asks_the_same_instance_again_when_there_is_no_other(make_world: MakeWorld) -> None:
    world = make_world(prefill_urls=("http://p1:1",))
    world.core.answers = [failed(), LOADED]
    assert (await run(world)).path == "remote"
    assert world.asker.urls == ["http://p1:1"] * 2


async def test_reprefill_computes_locally_after_the_last_attempt(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [failed("lease: expired")] * MAX_ATTEMPTS
    assert await run(world) == Ending("local", "load_lease")
    assert world.core.kinds == ["DeliverHandoff"] * MAX_ATTEMPTS + ["ComputeLocally"]
    assert world.core.messages[-1] == ComputeLocally(request_id="r1", reason="load_lease")
    assert (world.metrics.paths, world.metrics.fallbacks) == (["local"], ["load_lease"])


async def test_recompute_does_not_ask_twice(make_world: MakeWorld) -> None:
    world = make_world(load_failure="recompute")
    world.core.answers = [failed()]
    assert (await run(world)).path == "local"
    assert len(world.asker.asks) == 1


async def test_fail_ends_the_request_with_503(make_world: MakeWorld) -> None:
    world = make_world(load_failure="fail")
    world.core.answers = [failed("lease: expired")]
    ending = await run(world)
    assert ending.path == "failed"
    assert isinstance(ending.error, PDKVUnavailable)
    assert (ending.error.http_status, ending.error.code) == (503, "pd_kv_unavailable")
    assert "lease: expired" in str(ending.error)
    assert "--pd-load-failure fail" in str(ending.error)
    assert "ComputeLocally" not in world.core.kinds


async def test_strict_mode_never_computes_locally(make_world: MakeWorld) -> None:
    world = make_world(require_remote_kv=True)
    world.core.answers = [failed()] * MAX_ATTEMPTS
    ending = await run(world)
    assert isinstance(ending.error, PDKVUnavailable)
    assert "--pd-require-remote-kv" in str(ending.error)
    assert "ComputeLocally" not in world.core.kinds
    assert len(world.asker.asks) == MAX_ATTEMPTS


@pytest.mark.parametrize("policy", ["reprefill", "recompute", "fail"])
async def test_an_instance_that_does_not_answer_costs_no_policy(make_world: MakeWorld, policy: str) -> None:
    """Nothing was computed there, so another one is asked under every policy, and the dead one is skipped."""
    world = make_world(load_failure=policy)
    world.core.answers = [LOADED, LOADED]
    favourite = world.pool.choose(PROMPT.token_ids)
    assert favourite is not None
    world.asker.answers[favourite.url] = [AskFailed("unreachable", "refused")]
    assert (await run(world)).path == "remote"
    assert favourite.state is MemberState.DEAD
    assert (await run(world)).path == "remote"
    assert world.asker.urls.count(favourite.url) == 1


async def test_all_instances_dead_ends_in_a_local_prefill_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [AskFailed("unreachable", "refused")]
    assert await run(world) == Ending("local", "ask_unreachable")
    assert len(world.asker.asks) == 2


async def test_a_request_that_no_instance_will_take_is_asked_once(make_world: MakeWorld) -> None:
    world = make_world()
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [AskFailed("rejected", "HTTP 400", is_final=True)]
    assert await run(world) == Ending("local", "ask_rejected")
    assert len(world.asker.asks) == 1


async def test_a_busy_instance_does_not_leave_the_pool(make_world: MakeWorld) -> None:
    world = make_world(prefill_urls=("http://p1:1",))
    world.asker.answers["http://p1:1"] = [AskFailed("busy", "HTTP 503")] * MAX_ATTEMPTS
    assert await run(world) == Ending("local", "ask_busy")
    assert len(world.asker.asks) == MAX_ATTEMPTS
    assert world.pool.num_healthy == 1


async def test_a_failed_prefill_is_cancelled_where_it_may_still_run(make_world: MakeWorld) -> None:
    world = make_world(load_failure="recompute")
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [AskFailed("timeout", "no answer")]
    await run(world)
    ((url, epoch, ask),) = world.asker.asks
    assert world.asker.cancels == [(url, epoch, ask.transfer_id)]


async def test_a_handoff_with_a_bad_signature_is_not_delivered(make_world: MakeWorld) -> None:
    world = make_world(load_failure="recompute")
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [make_handoff("pd-d/e0/r1/0", signature="forged")]
    assert await run(world) == Ending("local", "ask_bad_answer")
    assert world.core.kinds == ["ComputeLocally"]


async def test_a_handoff_of_another_transfer_is_not_delivered(make_world: MakeWorld) -> None:
    world = make_world(load_failure="recompute")
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [make_handoff("pd-d/e0/other/0")]
    assert (await run(world)).reason == "ask_bad_answer"


async def test_a_restarted_instance_is_probed_at_once(make_world: MakeWorld) -> None:
    world = make_world(prefill_urls=("http://p1:1",))
    world.core.answers = [LOADED]
    world.asker.answers["http://p1:1"] = [make_handoff("pd-d/e0/r1/0", epoch="e2")]
    await run(world)
    assert world.pool.get_due() == world.pool.members


async def test_the_deadline_ends_an_ask_that_hangs(make_world: MakeWorld) -> None:
    """I7: with every policy the wait ends, and the prefill side is told."""
    world = make_world(deadline_s=0.05)
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [asyncio.Event()]
    assert await run(world) == Ending("local", "deadline")
    ((url, epoch, ask),) = world.asker.asks
    assert world.asker.cancels == [(url, epoch, ask.transfer_id)]
    assert world.metrics.fallbacks == ["deadline"]
    assert all(member.num_in_flight == 0 for member in world.pool.members)


async def test_the_deadline_is_a_504_where_local_prefill_is_forbidden(make_world: MakeWorld) -> None:
    world = make_world(deadline_s=0.05, load_failure="fail")
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [asyncio.Event()]
    ending = await run(world)
    assert isinstance(ending.error, PDDeadline)
    assert (ending.error.http_status, ending.error.code) == (504, "pd_deadline")
    assert "0.05 s" in str(ending.error)


async def test_a_member_lost_without_closing_connections_frees_its_asks(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [LOADED]
    favourite = world.pool.choose(PROMPT.token_ids)
    assert favourite is not None
    world.asker.answers[favourite.url] = [asyncio.Event()]
    task = asyncio.ensure_future(run(world))
    await world.settle()
    for _ in range(GIVE_UP_FAILURES):
        world.pool.mark_dead(favourite, "probe timed out")
    assert (await task).path == "remote"
    assert len(set(world.asker.urls)) == 2


async def test_a_cancel_during_the_ask_tells_the_prefill_side(make_world: MakeWorld) -> None:
    """F50."""
    world = make_world()
    for url in world.config.prefill_urls:
        world.asker.answers[url] = [asyncio.Event()]
    task = asyncio.ensure_future(run(world))
    await world.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.settle()
    ((url, epoch, ask),) = world.asker.asks
    assert world.asker.cancels == [(url, epoch, ask.transfer_id)]
    assert world.metrics.paths == ["gone"]
    assert not world.core.messages


async def test_a_cancel_after_delivery_leaves_the_lease_to_the_engine_core(make_world: MakeWorld) -> None:
    world = make_world()
    held = asyncio.Event()

    async def hold(message: object, timeout_s: float) -> LoadResult:
        await held.wait()
        return LOADED

    world.core.request = hold  # type: ignore[method-assign]
    task = asyncio.ensure_future(run(world))
    await world.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.settle()
    assert not world.asker.cancels


async def test_a_request_that_has_ended_is_nobody_s_failure(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [LoadResult(outcome="gone")]
    assert await run(world) == Ending("gone")
    assert world.metrics.fallbacks == []
    assert world.core.kinds == ["DeliverHandoff"]


async def test_a_handoff_that_the_client_brought_is_attempt_zero(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [LOADED]
    assert (await run(world, handoff=make_handoff("theirs"))).path == "remote"
    assert not world.asker.asks
    assert world.core.messages[0].handoff.transfer_id == "theirs"  # type: ignore[union-attr]


async def test_after_a_brought_handoff_fails_the_pool_is_asked(make_world: MakeWorld) -> None:
    world = make_world()
    world.core.answers = [failed(), LOADED]
    assert (await run(world, handoff=make_handoff("theirs"))).path == "remote"
    assert [ask.transfer_id for _, _, ask in world.asker.asks] == ["pd-d/e0/r1/0"]


async def test_after_a_brought_handoff_fails_without_a_pool_the_reason_is_the_load_s(make_world: MakeWorld) -> None:
    world = make_world(prefill_urls=())
    world.core.answers = [failed("peer: unreachable")]
    assert await run(world, handoff=make_handoff("theirs")) == Ending("local", "load_peer")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Refused(code="unsupported", message="no"), "load_unsupported"),
        (unreachable(), "core_unreachable"),
        (RuntimeError("a bug"), "internal_error"),
    ],
)
async def test_an_engine_core_that_misbehaves_never_leaves_the_request_waiting(
    make_world: MakeWorld, answer: Any, reason: str
) -> None:
    world = make_world(load_failure="recompute")
    world.core.answers = [answer]
    assert await run(world) == Ending("local", reason)
    assert world.core.kinds[-1] == "ComputeLocally"


async def test_compute_locally_is_sent_again_when_it_is_not_acknowledged(make_world: MakeWorld) -> None:
    """I7."""
    world = make_world(load_failure="recompute")
    world.core.answers = [failed(), unreachable()]
    assert (await run(world)).path == "local"
    assert world.core.kinds == ["DeliverHandoff", "ComputeLocally", "ComputeLocally"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lease", "lease"),
        ("handoff: layout differs 1 2", "handoff"),
        ("link timeout", "link_timeout"),
        ("10.0.0.1 said no", "failed"),
        ("", "failed"),
        ("x" * 80, "failed"),
    ],
)
def test_free_text_never_becomes_a_metric_label(text: str, expected: str) -> None:
    assert label(text) == expected
