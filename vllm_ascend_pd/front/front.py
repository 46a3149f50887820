# SPDX-License-Identifier: Apache-2.0
"""The front door of a decode instance: every request of the engine client passes here once.

Lives beside one AsyncLLM, on its event loop. Decides between remote KV and a counted fallback, marks the
request for the connector, and runs its ask task (`remote.py`). Reads requests by attribute only; knows vLLM
through `EnginePort`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final, Protocol

from vllm_ascend_pd.errors import PDHandoffError, PDRequestError
from vllm_ascend_pd.front.remote import Prompt, RemotePrefill, Services, refusal
from vllm_ascend_pd.handoff import from_kv_transfer_params
from vllm_ascend_pd.wire import Handoff

logger = logging.getLogger(__name__)

PARAMS_KEY: Final = "kv_transfer_params"
# Fallbacks that are failures to get remote KV, unlike features that PD does not carry.
FAILURES: Final = frozenset({"no_prefill_instance", "bad_handoff"})


class PDWrongRole(PDRequestError):
    """A prefill-side request was sent to a decode instance. Action: fix the router's list of instances."""

    http_status = 400
    code = "pd_wrong_role"


class EnginePort(Protocol):
    """What the front needs of the engine client."""

    def is_admitted(self, request_id: str) -> bool:
        """Whether the request is in the output processor (it may have been rejected after the hook)."""
        ...

    async def fail(self, request_id: str, error: PDRequestError) -> None:
        """End the request with a typed error, in the engine core too."""
        ...


class Background:
    """Tasks that nobody awaits; kept alive until done."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task; its exception is logged."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel_all(self) -> None:
        """Cancel what still runs; the loop may be gone already."""
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task of the front door failed", exc_info=error)


class PrefillFront:
    """See the module. Not thread-safe: one event loop."""

    def __init__(self, services: Services, engine: EnginePort, background: Background) -> None:
        self._services = services
        self._engine = engine
        self._background = background
        self._asks: dict[str, asyncio.Task[None]] = {}  # by internal request id

    @property
    def num_asks(self) -> int:
        """Requests that wait for remote KV now."""
        return len(self._asks)

    def wrap_request(self, request: Any) -> None:
        """Mark the request for remote KV and start its ask, or count why not.

        Mutates `request.params.extra_args`.

        Raises:
            PDKVUnavailable: a fallback, and `--pd-require-remote-kv` forbids it.
            PDWrongRole: the request asks this instance to be a prefill side.
        """
        client = take_params(request)
        if client.get("do_remote_decode"):
            raise PDWrongRole("this is a --pd-role decode instance; do_remote_decode belongs to a prefill one")
        reason = fallback_reason(request)
        handoff = None
        if reason is None and client.get("do_remote_prefill"):
            handoff, reason = self._read_handoff(client, request.prompt_token_ids)
        elif reason is None and not self._services.config.prefill_urls:
            reason = "no_handoff"
        if reason is None and handoff is None and self._services.pool.choose(request.prompt_token_ids) is None:
            reason = "no_prefill_instance"
        if reason is not None:
            self.count_fallback(reason)
            return
        prompt = Prompt(
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        remote = RemotePrefill(self._services, prompt, handoff)
        put_params(
            request,
            {
                "do_remote_prefill": True,
                "pd_transfer_id": remote.transfer_id,
                "pd_wait": True,
                "pd_deadline_ms": self._services.config.deadline_ms,
            },
        )
        task = self._background.spawn(self._run(prompt.request_id, remote))
        self._asks[prompt.request_id] = task
        task.add_done_callback(lambda _: self._asks.pop(prompt.request_id, None))

    def count_fallback(self, reason: str) -> None:
        """Count a request that is served without remote KV.

        Raises:
            PDKVUnavailable: `--pd-require-remote-kv` forbids it, or it is a failure and `--pd-load-failure` is fail.
        """
        config, metrics = self._services.config, self._services.metrics
        is_failure = reason in FAILURES and config.load_failure == "fail"
        metrics.count_fallback(reason)
        metrics.count_request("failed" if config.require_remote_kv or is_failure else "local")
        if config.require_remote_kv or is_failure:
            raise refusal(config, reason)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Those requests were aborted: stop their asks, which tells the prefill side."""
        for request_id in request_ids:
            task = self._asks.get(request_id)
            if task is not None and task is not _current_task():
                task.cancel()

    def to_status(self) -> dict[str, Any]:
        """For /pd/status: numbers of this API server process alone."""
        return {
            "waiting_for_kv": self.num_asks,
            "pool": [member.to_status() for member in self._services.pool.members],
        }

    async def _run(self, request_id: str, remote: RemotePrefill) -> None:
        # The hook runs before upstream's admission control, which may have rejected the request meanwhile.
        if not self._engine.is_admitted(request_id):
            return
        ending = await remote.run()
        if ending.error is not None:
            logger.warning("request_id=%s: %s", request_id, ending.error)
            await self._engine.fail(request_id, ending.error)

    def _read_handoff(self, client: dict[str, Any], token_ids: list[int]) -> tuple[Handoff | None, str | None]:
        """(handoff, None) or (None, reason). Without a good handoff the pool is asked, where there is one."""
        config = self._services.config
        try:
            handoff = from_kv_transfer_params(client)
            if handoff is None:
                raise PDHandoffError("kv_transfer_params has no pd_handoff; is the prefill side of this distribution?")
            self._services.check_handoff(handoff, token_ids)
            return handoff, None
        except PDHandoffError as error:
            logger.warning("a request brought a handoff that is not ours: %s", error)
        self._services.metrics.count_ask_failure("bad_handoff")
        if config.prefill_urls and config.load_failure == "reprefill":
            return None, None
        return None, "bad_handoff"


def fallback_reason(request: Any) -> str | None:
    """Why this request's KV cannot come from a prefill instance, or None. Reads an EngineCoreRequest."""
    params = request.sampling_params
    if params is None:
        return "pooling"
    found = {
        "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
        "multimodal": bool(request.mm_features),
        "lora": request.lora_request is not None,
        "n>1": params.n > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "streaming_input": bool(getattr(request, "resumable", False)),
    }
    return next((reason for reason, present in found.items() if present), None)


def clear_unsupported_decode(request: Any) -> None:
    """On a prefill instance: keep no KV for a request whose decode side computes the prompt itself anyway."""
    params = take_params(request)
    if not params:
        return
    if params.get("do_remote_prefill"):
        raise PDWrongRole("this is a --pd-role prefill instance; do_remote_prefill belongs to a decode one")
    if fallback_reason(request) is None:
        put_params(request, params)


def is_our_ask(request: Any) -> bool:
    """On a prefill instance: whether it came by /pd/prefill. A client can pretend so, and only passes a drain."""
    sampling = request.sampling_params
    params = (sampling.extra_args or {}).get(PARAMS_KEY) if sampling is not None else None
    return isinstance(params, dict) and "pd_ask" in params


def take_params(request: Any) -> dict[str, Any]:
    """Remove and return the client's kv_transfer_params."""
    sampling = request.sampling_params
    if sampling is None or not sampling.extra_args or PARAMS_KEY not in sampling.extra_args:
        return {}
    rest = dict(sampling.extra_args)
    params = rest.pop(PARAMS_KEY)
    sampling.extra_args = rest or None
    return params if isinstance(params, dict) else {}


def put_params(request: Any, params: dict[str, Any]) -> None:
    """Set kv_transfer_params."""
    sampling = request.sampling_params
    sampling.extra_args = {**(sampling.extra_args or {}), PARAMS_KEY: params}


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
