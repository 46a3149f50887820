# SPDX-License-Identifier: Apache-2.0
"""Fakes of what the front door talks to: an engine core, prefill instances, an engine client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.errors import PDHandoffError, PDRequestError, PDUnreachableError
from vllm_ascend_pd.front.front import Background, PrefillFront
from vllm_ascend_pd.front.http_messages import PrefillAnswer, PrefillAsk
from vllm_ascend_pd.front.pool import PrefillPool
from vllm_ascend_pd.front.remote import Services
from vllm_ascend_pd.wire import Ack, Answer, Handoff, LoadResult, LocalMessage

LOADED = LoadResult(outcome="loaded")


def make_config(role: PDRole = PDRole.DECODE, **values: Any) -> PDConfig:
    """A decode config with two prefill URLs."""
    urls = ("http://p1:1", "http://p2:2") if role is PDRole.DECODE else ()
    values = {"prefill_urls": urls, "deadline_s": 5.0, **values}
    return PDConfig(role=role, engine_id="pd-d", epoch="e0", runtime_dir="/run/pd", **values)


def make_handoff(transfer_id: str, num_tokens: int = 4, **values: Any) -> Handoff:
    """A handoff of that many tokens."""
    values = {"epoch": "e1", "host": "p1", "port": 5, "signature": "good", **values}
    return Handoff(
        transfer_id=transfer_id,
        lease_id="l1",
        engine_id="pd-p",
        num_tokens=num_tokens,
        prompt_digest="d",
        block_ids=((1,),),
        layout="x",
        lease_ms=1000,
        **values,
    )


class FakeCore:
    """Records messages; `answers` is used up from the front, then everything is acknowledged."""

    def __init__(self) -> None:
        self.messages: list[LocalMessage] = []
        self.answers: list[Answer | Exception] = []

    async def request(self, message: LocalMessage, timeout_s: float) -> Answer:
        assert timeout_s > 0
        self.messages.append(message)
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if self.answers else Ack()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.messages]


class FakeAsker:
    """Prefill instances; `answers` maps a URL to what happens there, else a good handoff."""

    def __init__(self) -> None:
        self.asks: list[tuple[str, str, PrefillAsk]] = []
        self.cancels: list[tuple[str, str, str]] = []
        self.answers: dict[str, list[Exception | Handoff | asyncio.Event]] = {}

    async def ask(self, url: str, epoch: str, ask: PrefillAsk, timeout_s: float) -> PrefillAnswer:
        self.asks.append((url, epoch, ask))
        await asyncio.sleep(0)
        planned = self.answers.get(url, [])
        answer = planned.pop(0) if planned else make_handoff(ask.transfer_id, len(ask.token_ids))
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = make_handoff(ask.transfer_id, len(ask.token_ids))
        if isinstance(answer, Exception):
            raise answer
        return PrefillAnswer(handoff=answer, first_token_id=1, cached_tokens=0)

    async def cancel(self, url: str, epoch: str, transfer_id: str) -> bool:
        self.cancels.append((url, epoch, transfer_id))
        return True

    @property
    def urls(self) -> list[str]:
        return [url for url, _, _ in self.asks]


class FakeMetrics:
    """Lists what was counted."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.fallbacks: list[str] = []
        self.failures: list[str] = []
        self.num_answers = 0

    def count_request(self, path: str) -> None:
        self.paths.append(path)

    def count_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)

    def count_ask_failure(self, reason: str) -> None:
        self.failures.append(reason)

    def observe_ask(self, seconds: float) -> None:
        self.num_answers += 1


class FakeEngine:
    """EnginePort: `failed` holds the errors that requests ended with."""

    def __init__(self) -> None:
        self.rejected: set[str] = set()
        self.failed: dict[str, PDRequestError] = {}

    def is_admitted(self, request_id: str) -> bool:
        return request_id not in self.rejected

    async def fail(self, request_id: str, error: PDRequestError) -> None:
        self.failed[request_id] = error


class World:
    """A decode instance's front door with fakes around it; both prefill instances are healthy."""

    def __init__(self, **values: Any) -> None:
        self.config = make_config(**values)
        self.core, self.asker, self.metrics, self.engine = FakeCore(), FakeAsker(), FakeMetrics(), FakeEngine()
        self.pool = PrefillPool(self.config.static_prefill_urls)
        for member in self.pool.members:
            self.pool.mark_healthy(member, "pd-p", "e1")
        self.background = Background()
        self.services = Services(
            config=self.config,
            core=self.core,
            asker=self.asker,
            pool=self.pool,
            metrics=self.metrics,  # type: ignore[arg-type]
            check_handoff=check_signature,
            spawn=self.background.spawn,
        )
        self.front = PrefillFront(self.services, self.engine, self.background)

    async def settle(self) -> None:
        """Let everything that can run, run."""
        for _ in range(100):
            await asyncio.sleep(0)


def check_signature(handoff: Handoff, token_ids: list[int]) -> None:
    if handoff.signature != "good":
        raise PDHandoffError("wrong signature")


def make_request(request_id: str = "r1", **values: Any) -> Any:
    """The attributes of an EngineCoreRequest that are read."""
    sampling = {"n": 1, "prompt_logprobs": None, "extra_args": values.pop("extra_args", None)}
    sampling |= {key: values.pop(key) for key in list(values) if key in sampling}
    fields = {
        "request_id": request_id,
        "prompt_token_ids": [1, 2, 3, 4],
        "prompt_embeds": None,
        "mm_features": None,
        "lora_request": None,
        "cache_salt": None,
        "priority": 0,
        "resumable": False,
        "sampling_params": SimpleNamespace(**sampling),
        **values,
    }
    return SimpleNamespace(**fields)


def unreachable(*_: object) -> Exception:
    return PDUnreachableError("core.sock did not answer")
