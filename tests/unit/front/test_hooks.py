# SPDX-License-Identifier: Apache-2.0
"""What upstream's edited places call: errors that pass through `generate`, aborts, start and shutdown."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.unit.front.fakes import World, make_config, make_request, unreachable
from vllm_ascend_pd.config import PDRole
from vllm_ascend_pd.errors import PDDraining, PDKVUnavailable, PDUnreachableError
from vllm_ascend_pd.front import hooks
from vllm_ascend_pd.front.engine_errors import as_engine_error, pd_error_response
from vllm_ascend_pd.front.metrics import FrontMetrics
from vllm_ascend_pd.wire import Ack, HealthReply


class Engine:
    """The attributes of an AsyncLLM that are read."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)
        self.errored = False
        self.queue: list[Exception] = []
        state = SimpleNamespace(queue=SimpleNamespace(put=self.queue.append))
        self.output_processor = SimpleNamespace(request_states={"r1": state})
        self.aborted: list[tuple[str, bool]] = []

    async def abort(self, request_id: str, internal: bool) -> None:
        self.aborted.append((request_id, internal))


def beside(engine: Engine, world: World, **values: Any) -> SimpleNamespace:
    instance = SimpleNamespace(
        config=world.config,
        core=world.core,
        front=world.front,
        watcher=None,
        background=world.background,
        close=lambda: None,
        start_watching=lambda: None,
        drain=SimpleNamespace(check=lambda: None),
    )
    for name, value in values.items():
        setattr(instance, name, value)
    hooks._instances[engine] = instance  # type: ignore[assignment]
    return instance


async def test_without_pd_every_hook_is_a_no_op() -> None:
    engine, request = Engine(), make_request(extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    hooks.wrap_request(engine, request)
    hooks.count_streaming_session(engine)
    hooks.forget_requests(engine, ["r1"])
    await hooks.start_api_server(engine)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    assert await hooks.get_health_problem(SimpleNamespace(app=app)) is None
    hooks.close_engine(engine)
    assert request.sampling_params.extra_args == {"kv_transfer_params": {"do_remote_prefill": True}}


async def test_a_render_server_without_an_engine_is_healthy() -> None:
    app = SimpleNamespace(state=SimpleNamespace(engine_client=None))
    assert await hooks.get_health_problem(SimpleNamespace(app=app)) is None


async def test_a_refused_request_raises_what_generate_lets_through() -> None:
    exceptions = pytest.importorskip("vllm.exceptions")
    engine = Engine()
    beside(engine, World(require_remote_kv=True))
    with pytest.raises(Exception, match="n>1") as caught:
        hooks.wrap_request(engine, make_request(n=2))
    passed = getattr(exceptions, "GracefulHTTPError", None) or ValueError
    assert isinstance(caught.value, passed)
    assert isinstance(caught.value.pd_error, PDKVUnavailable)  # type: ignore[attr-defined]


def refuse() -> None:
    raise PDDraining("drained")


async def test_a_draining_instance_takes_nothing_new_but_asks_that_it_took_before() -> None:
    pytest.importorskip("vllm.exceptions")
    drained = SimpleNamespace(check=refuse)
    decode, prefill = Engine(), Engine()
    beside(decode, World(), drain=drained)
    beside(prefill, World(), drain=drained, front=None)
    asked = make_request(extra_args={"kv_transfer_params": {"do_remote_decode": True, "pd_ask": "signature"}})
    hooks.wrap_request(prefill, asked)
    unsigned = make_request(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    for engine, request in ((decode, make_request()), (prefill, make_request()), (prefill, unsigned)):
        with pytest.raises(Exception, match="drained") as caught:
            hooks.wrap_request(engine, request)
        assert caught.value.pd_error.code == "pd_draining"  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="drained"):
        hooks.count_streaming_session(decode)


async def test_a_failed_request_gets_its_error_before_the_abort_s_output() -> None:
    """The queue keeps an exception against later outputs, so the client sees the error and not an abort."""
    pytest.importorskip("vllm")
    engine = Engine()
    port = hooks._EnginePort(engine)
    assert port.is_admitted("r1")
    await port.fail("r1", PDKVUnavailable("no KV"))
    (error,) = engine.queue
    assert error.pd_error.code == "pd_kv_unavailable"  # type: ignore[attr-defined]
    assert engine.aborted == [("r1", True)]
    await port.fail("gone", PDKVUnavailable("no KV"))
    assert len(engine.queue) == 1


def test_the_http_answer_keeps_code_and_status() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.serve.engine.protocol")
    error = as_engine_error(PDKVUnavailable("no KV"))
    response = pd_error_response(error, protocol.ErrorResponse, protocol.ErrorInfo)
    assert response.model_dump() == {
        "error": {"message": "no KV", "type": "pd_kv_unavailable", "param": None, "code": 503}
    }
    assert error.http_status is HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined]


@pytest.mark.parametrize("message", ["text", ValueError("x"), None])
def test_other_errors_are_upstream_s_business(message: Any) -> None:
    assert pd_error_response(message, None, None) is None


async def test_start_waits_for_the_engine_core_then_for_a_prefill_instance() -> None:
    engine, world = Engine(), World()
    order: list[Any] = []

    class Watcher:
        async def wait_for_first(self) -> None:
            order.append(world.core.kinds)

    beside(engine, world, watcher=Watcher(), start_watching=lambda: order.append("watching"))
    await hooks.start_api_server(engine)
    assert order == [["StatusQuery"], "watching"]


async def test_a_start_that_fails_ends_the_process_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    engine, world = Engine(), World()

    class Watcher:
        async def wait_for_first(self) -> None:
            raise PDUnreachableError("no prefill instance answered: http://p1:1")

    beside(engine, world, watcher=Watcher())
    with pytest.raises(SystemExit) as caught:
        await hooks.start_api_server(engine)
    assert caught.value.code == 1
    assert "http://p1:1" in caplog.text


async def test_an_engine_core_that_dies_during_the_wait_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "LIFE_CHECK_S", 0.01)
    engine, world = Engine(), World()

    class Watcher:
        async def wait_for_first(self) -> None:
            engine.errored = True
            await asyncio.Event().wait()

    beside(engine, world, watcher=Watcher())
    with pytest.raises(SystemExit):
        await hooks.start_api_server(engine)
    assert "engine core has died" in caplog.text


@pytest.mark.parametrize(
    ("values", "linked", "num_problems"),
    [({"require_remote_kv": True}, False, 1), ({"require_remote_kv": True}, True, 0), ({}, False, 0)],
)
async def test_health_needs_a_peer_in_strict_mode_only(values: dict[str, Any], linked: bool, num_problems: int) -> None:
    """I15."""
    world = World(**values)
    world.core.answers = [HealthReply()]
    instance = beside(Engine(), world, watcher=SimpleNamespace(is_any_linked=linked))
    assert len(await hooks.find_problems(instance)) == num_problems  # type: ignore[arg-type]


async def test_an_unexpected_answer_to_a_health_query_is_a_problem() -> None:
    world = World()
    world.core.answers = [Ack()]
    assert await hooks.find_problems(beside(Engine(), world))  # type: ignore[arg-type]
    world.core.answers = [unreachable()]
    assert await hooks.find_problems(beside(Engine(), world))  # type: ignore[arg-type]


def test_closing_twice_or_a_broken_instance_never_raises() -> None:
    """It runs in a destructor."""
    engine = Engine()

    def explode() -> None:
        raise RuntimeError

    hooks._instances[engine] = SimpleNamespace(close=explode)  # type: ignore[assignment]
    hooks.close_engine(engine)
    hooks.close_engine(engine)
    hooks.close_engine(None)


def test_metrics_come_back_after_vllm_has_unregistered_them() -> None:
    metrics = FrontMetrics()
    metrics.register()
    metrics.register()
    try:
        metrics.count_fallback("n>1")
        assert REGISTRY.get_sample_value("vllm:pd_remote_kv_fallback_total", {"reason": "n>1"}) == 1
        REGISTRY.unregister(metrics._fallbacks)
        metrics.register()
        assert REGISTRY.get_sample_value("vllm:pd_remote_kv_fallback_total", {"reason": "n>1"}) == 1
    finally:
        for collector in (metrics._requests, metrics._fallbacks, metrics._ask_seconds, metrics._ask_failures):
            REGISTRY.unregister(collector)


def test_recording_a_metric_never_raises() -> None:
    """I8."""
    metrics = FrontMetrics()
    metrics._fallbacks = None  # type: ignore[assignment]
    metrics.count_fallback("x")


def test_configs_of_both_roles_are_told_apart() -> None:
    assert make_config(PDRole.PREFILL).role.kv_role == "kv_producer"
