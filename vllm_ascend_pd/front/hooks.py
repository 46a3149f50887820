# SPDX-License-Identifier: Apache-2.0
"""What the edits of upstream's engine client and API server call. Each is a no-op without `--pd-role`.

Imports neither vLLM nor anything heavy when it is imported. All but `close_engine` run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final

from vllm_ascend_pd.config import PDRole, pd_config_of
from vllm_ascend_pd.errors import PDError, PDRequestError, PDUnreachableError
from vllm_ascend_pd.front.engine_errors import as_engine_error

if TYPE_CHECKING:
    from vllm_ascend_pd.front.instance import Instance

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S: Final = 5.0
CORE_START_TIMEOUT_S: Final = 60.0
LIFE_CHECK_S: Final = 1.0

# Beside the engine clients, not on them: vLLM's objects keep their own attributes.
_instances: weakref.WeakKeyDictionary[Any, Instance | None] = weakref.WeakKeyDictionary()


class _EnginePort:
    """EnginePort over an AsyncLLM; holds it weakly, so that it is collected as upstream intends."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def is_admitted(self, request_id: str) -> bool:
        engine = self._engine()
        return engine is not None and request_id in engine.output_processor.request_states

    async def fail(self, request_id: str, error: PDRequestError) -> None:
        engine = self._engine()
        state = None if engine is None else engine.output_processor.request_states.get(request_id)
        if engine is None or state is None:
            return
        if state.queue is not None:
            state.queue.put(as_engine_error(error))
        await engine.abort(request_id, internal=True)


def instance_of(engine: Any) -> Instance | None:
    """The PD part of an engine client, made at the first call; None when PD is off."""
    if engine is None:
        return None
    if engine not in _instances:
        config = pd_config_of(engine.vllm_config)
        if config is None:
            _instances[engine] = None
        else:
            from vllm_ascend_pd.front.instance import Instance
            from vllm_ascend_pd.logs import follow_vllm_logging

            follow_vllm_logging()
            _instances[engine] = Instance(config, _EnginePort(engine))
    return _instances[engine]


# ---------------------------------------------------------------- v1/engine/async_llm.py


def wrap_request(engine: Any, request: Any) -> None:
    """A request has got its internal id: decide where its prompt's KV comes from.

    Raises:
        an error that upstream's `generate` passes through, carrying the PDRequestError.
    """
    instance = instance_of(engine)
    if instance is None:
        return
    try:
        if instance.front is not None:
            instance.drain.check()
            instance.start_watching()  # an engine client without an API server has not
            instance.front.wrap_request(request)
        else:
            from vllm_ascend_pd.front.front import clear_unsupported_decode, is_our_ask

            if not is_our_ask(request):  # `PrefillServer` has looked already
                instance.drain.check()
            clear_unsupported_decode(request)
    except PDRequestError as error:
        raise as_engine_error(error) from error


def count_streaming_session(engine: Any) -> None:
    """A request whose prompt comes in pieces is computed here."""
    instance = instance_of(engine)
    if instance is None or instance.front is None:
        return
    try:
        instance.drain.check()
        instance.front.count_fallback("streaming_input")
    except PDRequestError as error:
        raise as_engine_error(error) from error


def forget_requests(engine: Any, request_ids: Iterable[str]) -> None:
    """Requests (internal ids) were aborted."""
    instance = _instances.get(engine)
    if instance is not None and instance.front is not None:
        instance.front.forget(request_ids)


def close_engine(engine: Any) -> None:
    """The engine client shuts down. Also called by its destructor: never raises."""
    try:
        instance = _instances.pop(engine, None)
        if instance is not None:
            instance.close()
    except Exception:
        logger.debug("closing the front door failed", exc_info=True)


# ---------------------------------------------------------------- the API server


async def start_api_server(engine: Any) -> None:
    """Before this API server serves: the engine core answers, and (decode) the first prefill instance is linked.

    Raises:
        SystemExit: it cannot be; the reason was logged.
    """
    instance = instance_of(engine)
    if instance is None:
        return
    from vllm_ascend_pd.wire import StatusQuery

    try:
        await instance.core.request(StatusQuery(), CORE_START_TIMEOUT_S)
        if instance.watcher is not None:
            await _unless_dead(engine, instance.watcher.wait_for_first())
            instance.start_watching()
    except PDError as error:
        logger.error("--pd-role %s cannot start: %s", instance.config.role.value, error)
        raise SystemExit(1) from None


async def _unless_dead(engine: Any, waiting: Coroutine[Any, Any, None]) -> None:
    """Await a long wait, but not beyond the life of the engine core.

    Raises:
        PDUnreachableError: the engine core has died.
    """
    task = asyncio.ensure_future(waiting)
    try:
        while not task.done():
            if engine.errored:
                raise PDUnreachableError("the engine core has died; its own messages above say why")
            await asyncio.wait({task}, timeout=LIFE_CHECK_S)
        task.result()
    finally:
        task.cancel()


def attach_routes(app: Any) -> None:
    """Add /pd/* to the app. Without `--pd-role` they answer 404."""
    from vllm_ascend_pd.front.routes import attach

    attach(app)


async def get_health_problem(request: Any) -> Any:
    """A 503 response that says what is wrong with PD, or None."""
    instance = instance_of(request.app.state.engine_client)
    if instance is None:
        return None
    problems = await find_problems(instance)
    if not problems:
        return None
    from fastapi.responses import JSONResponse

    return JSONResponse({"problems": problems}, status_code=503)


async def find_problems(instance: Instance) -> list[str]:
    """One sentence per reason why this instance is not healthy."""
    from vllm_ascend_pd.wire import HealthQuery, HealthReply

    problems: list[str] = []
    try:
        answer = await instance.core.request(HealthQuery(), HEALTH_TIMEOUT_S)
        problems += answer.problems if isinstance(answer, HealthReply) else [f"engine core: {answer}"]
    except PDUnreachableError as error:
        problems.append(f"engine core: {error}")
    config = instance.config
    if config.role is PDRole.DECODE and config.require_remote_kv and config.prefill_urls:
        assert instance.watcher is not None
        if not instance.watcher.is_any_linked:
            problems.append("no prefill instance is reachable and --pd-require-remote-kv forbids to do without")
    return problems
