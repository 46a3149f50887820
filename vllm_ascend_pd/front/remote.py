# SPDX-License-Identifier: Apache-2.0
"""One request's way to remote KV: ask, deliver, and what follows when that fails.

Runs as a task on the API server's event loop beside the request, which has entered the engine core at the
same moment and waits there. `--pd-load-failure` is applied here and nowhere else. Knows nothing of vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.errors import (
    PDDeadline,
    PDHandoffError,
    PDKVUnavailable,
    PDRequestError,
    PDUnreachableError,
)
from vllm_ascend_pd.front.ask import AskFailed
from vllm_ascend_pd.front.http_messages import PrefillAnswer, PrefillAsk
from vllm_ascend_pd.front.metrics import FrontMetrics
from vllm_ascend_pd.front.pool import Member, PrefillPool
from vllm_ascend_pd.wire import (
    Answer,
    ComputeLocally,
    DeliverHandoff,
    Handoff,
    LoadResult,
    LocalMessage,
    Refused,
)

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 3
GONE: Final = "gone"
CORE_GRACE_S: Final = 5.0  # the engine core's own deadline lies this much behind ours
COMPUTE_LOCALLY_TRIES: Final = 3

# Nothing was computed: another instance may do it under every policy.
_UNTOUCHED: Final = frozenset({"unreachable", "busy", "unauthorized", "not_prefill"})
# The instance is gone, or is not the one that we shook hands with: out of the pool until probed again.
_LOST: Final = frozenset({"unreachable", "unauthorized", "not_prefill"})


class Core(Protocol):
    """The local plane, to this instance's engine core."""

    async def request(self, message: LocalMessage, timeout_s: float) -> Answer:
        """Send a message and wait for its answer; PDUnreachableError after `timeout_s`."""
        ...


class Asker(Protocol):
    """What of `AskClient` is needed here."""

    async def ask(self, url: str, epoch: str, ask: PrefillAsk, timeout_s: float) -> PrefillAnswer:
        """See AskClient."""
        ...

    async def cancel(self, url: str, epoch: str, transfer_id: str) -> bool:
        """See AskClient."""
        ...


@dataclasses.dataclass(frozen=True)
class Services:
    """What all requests of one front share."""

    config: PDConfig
    core: Core
    asker: Asker
    pool: PrefillPool
    metrics: FrontMetrics
    check_handoff: Callable[[Handoff, list[int]], None]  # raises PDHandoffError
    spawn: Callable[[Coroutine[Any, Any, Any]], object]  # background work that outlives the request
    clock: Callable[[], float] = time.monotonic


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The part of a request that a prefill instance needs."""

    request_id: str  # internal
    token_ids: list[int]
    cache_salt: str | None = None
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the wait for remote KV ended. `path`: remote, local, failed (see `error`), gone."""

    path: str
    reason: str = ""
    error: PDRequestError | None = None


class RemotePrefill:
    """The ask task of one request. `run` may be cancelled at any point; the prefill side is told."""

    def __init__(self, services: Services, prompt: Prompt, handoff: Handoff | None = None) -> None:
        self._services = services
        self._prompt = prompt
        self._handoff = handoff  # brought by the client (two-phase): attempt 0
        self._num_asks = 0
        self._end_s = services.clock() + services.config.deadline_s
        # Where a prefill may hold KV that our engine core does not know of: (url, epoch, transfer id).
        self._undelivered: tuple[str, str, str] | None = None

    @property
    def transfer_id(self) -> str:
        """The id of the current attempt. Compared, never parsed."""
        if self._handoff is not None and self._num_asks == 0:
            return self._handoff.transfer_id
        config = self._services.config
        return f"{config.engine_id}/{config.epoch}/{self._prompt.request_id}/{max(self._num_asks - 1, 0)}"

    async def run(self) -> Ending:
        """Bring remote KV to the request, or settle what happens without it. Raises only when cancelled."""
        path = "gone"
        try:
            ending = await self._run()
            path = ending.path
            return ending
        finally:
            if self._undelivered is not None:
                self._services.spawn(self._services.asker.cancel(*self._undelivered))
            self._services.metrics.count_request(path)

    async def _run(self) -> Ending:
        try:
            reason, detail = await asyncio.wait_for(self._load(), self._remaining_s())
        except asyncio.TimeoutError:
            return await self._settle("deadline", is_late=True)
        except Exception:
            logger.exception("request_id=%s: the ask failed", self._prompt.request_id)
            return await self._settle("internal_error")
        if reason in ("", GONE):
            return Ending("gone" if reason else "remote")
        return await self._settle(reason, detail)

    async def _load(self) -> tuple[str, str]:
        """(reason, detail) of the last failure; an empty reason when the KV is there, GONE when nobody wants it."""
        policy, pool = self._services.config.load_failure, self._services.pool
        avoid: set[str] = set()
        num_attempts, reason, detail = 0, "no_prefill_instance", "no prefill instance is reachable"
        while num_attempts < MAX_ATTEMPTS:
            handoff = self._handoff if self._num_asks == 0 else None
            if handoff is None:
                member = pool.choose(self._prompt.token_ids, avoid)
                if member is None:
                    break
                avoid.add(member.url)
                try:
                    handoff = await self._ask(member)
                except AskFailed as error:
                    reason, detail = f"ask_{error.reason}", str(error)
                    logger.warning("request_id=%s: %s", self._prompt.request_id, error)
                    num_attempts += error.reason not in _LOST  # a lost member leaves the pool: bounded too
                    if error.is_final or (policy != "reprefill" and error.reason not in _UNTOUCHED):
                        break
                    continue
            num_attempts += 1
            reason, detail = await self._deliver(handoff)
            if reason in ("", GONE):
                break
            logger.warning("request_id=%s: load failed: %s", self._prompt.request_id, detail)
            if policy != "reprefill":
                break
            self._handoff = None
        return reason, detail

    async def _ask(self, member: Member) -> Handoff:
        services, prompt = self._services, self._prompt
        self._num_asks += 1
        self._handoff = None
        transfer_id = self.transfer_id
        ask = PrefillAsk(
            transfer_id=transfer_id,
            token_ids=prompt.token_ids,
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
        )
        started_s = services.clock()
        self._undelivered = (member.url, member.epoch, transfer_id)
        # Our own deadline ends an ask; the client's timeout lies behind it.
        timeout_s = self._remaining_s() + CORE_GRACE_S
        task = asyncio.ensure_future(services.asker.ask(member.url, member.epoch, ask, timeout_s))
        services.pool.start_ask(member, len(prompt.token_ids), task.cancel)
        try:
            answer = await _unless_lost(task, member)
            self._check(answer.handoff, transfer_id, member)
        except AskFailed as error:
            services.metrics.count_ask_failure(error.reason)
            if error.reason in _LOST:
                services.pool.mark_dead(member, str(error))
            elif error.reason not in _UNTOUCHED and not error.is_final:
                services.spawn(services.asker.cancel(*self._undelivered))
            self._undelivered = None
            raise
        finally:
            services.pool.end_ask(member, len(prompt.token_ids), task.cancel)
        services.metrics.observe_ask(services.clock() - started_s)
        return answer.handoff

    def _check(self, handoff: Handoff, transfer_id: str, member: Member) -> None:
        try:
            self._services.check_handoff(handoff, self._prompt.token_ids)
        except PDHandoffError as error:
            raise AskFailed("bad_answer", f"{member.url}: {error}") from error
        if handoff.transfer_id != transfer_id:
            raise AskFailed(
                "bad_answer", f"{member.url} answered transfer {handoff.transfer_id!r}, not {transfer_id!r}"
            )
        if handoff.epoch != member.epoch:
            member.probe_at_s = 0.0  # it was restarted: the watcher does the handshake anew

    async def _deliver(self, handoff: Handoff) -> tuple[str, str]:
        """(reason, detail) of the failure; both empty when the KV is there."""
        remaining_s = self._remaining_s()
        message = DeliverHandoff(
            request_id=self._prompt.request_id, handoff=handoff, deadline_ms=int(remaining_s * 1000)
        )
        self._undelivered = None  # from here on the engine core answers for the lease
        try:
            answer = await self._services.core.request(message, remaining_s + CORE_GRACE_S)
        except PDUnreachableError as error:
            return "core_unreachable", str(error)
        if isinstance(answer, LoadResult):
            if answer.outcome == "loaded":
                return "", ""
            if answer.outcome == "gone":
                return GONE, ""
            return f"load_{label(answer.reason)}", answer.reason
        if isinstance(answer, Refused):
            return f"load_{label(answer.code)}", answer.message
        return "load_failed", f"the engine core answered {type(answer).__name__}"

    async def _settle(self, reason: str, detail: str = "", is_late: bool = False) -> Ending:
        """The request gets no remote KV: an error, or a prefill of our own."""
        config, metrics = self._services.config, self._services.metrics
        metrics.count_fallback(reason)
        if config.require_remote_kv or config.load_failure == "fail":
            return Ending("failed", reason, refusal(config, reason, detail, is_late))
        message = ComputeLocally(request_id=self._prompt.request_id, reason=reason)
        for _ in range(COMPUTE_LOCALLY_TRIES):
            try:
                await self._services.core.request(message, CORE_GRACE_S)
                break
            except PDUnreachableError as error:
                logger.warning("request_id=%s: %s", self._prompt.request_id, error)
        return Ending("local", reason)

    def _remaining_s(self) -> float:
        return max(self._end_s - self._services.clock(), 0.001)


async def _unless_lost(task: asyncio.Future[PrefillAnswer], member: Member) -> PrefillAnswer:
    """The answer; the pool cancels the task when probes find that the member is gone without closing connections.

    Raises:
        AskFailed: the ask's own, or "unreachable" when the pool gave up on the member.
    """
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if task.cancelled():
        raise AskFailed("unreachable", f"{member.url} was lost while it computed: {member.detail}")
    return task.result()


def refusal(config: PDConfig, reason: str, detail: str = "", is_late: bool = False) -> PDRequestError:
    """The typed error of a request that may not be computed here."""
    flag = "--pd-require-remote-kv" if config.require_remote_kv else f"--pd-load-failure {config.load_failure}"
    if is_late:
        return PDDeadline(f"remote KV did not come within {config.deadline_s:g} s (--pd-deadline); {flag}")
    return PDKVUnavailable(f"no remote KV for this request ({reason}{f': {detail}' if detail else ''}); {flag}")


def label(text: str) -> str:
    """A reason as a metric label: one short word, so that free text cannot multiply time series."""
    word = text.partition(":")[0].strip().lower().replace("-", "_").replace(" ", "_")
    return word if word.isidentifier() and len(word) <= 40 else "failed"
