# SPDX-License-Identifier: Apache-2.0
"""The prefill side's answers to decode instances: compute a prompt and lease its KV, or cancel that.

Runs on the event loop of a prefill instance's API server, behind `routes.py`. Knows of vLLM only the engine client's
`generate`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.errors import PDRequestError, PDUnreachableError
from vllm_ascend_pd.front.drain import DrainSwitch
from vllm_ascend_pd.front.http_messages import CancelAsk, PeerFacts, PrefillAnswer, PrefillAsk
from vllm_ascend_pd.front.remote import Core
from vllm_ascend_pd.handoff import ask_bytes, from_kv_transfer_params, prompt_digest
from vllm_ascend_pd.secret import RequestVerifier, Secret
from vllm_ascend_pd.wire import WIRE_VERSION, CancelTransfer, StatusQuery, StatusReply

logger = logging.getLogger(__name__)

CORE_TIMEOUT_S: Final = 5.0
MAX_CANCELLED: Final = 4096


class PrefillRefused(PDRequestError):
    """An ask cannot be served; the status says whether another instance may."""

    def __init__(self, http_status: int, message: str, code: str = "pd_prefill_refused") -> None:
        super().__init__(message)
        self.http_status = http_status
        self.code = code


class PrefillServer:
    """Asks in flight in this API server process. Not thread-safe: one event loop."""

    def __init__(self, config: PDConfig, secret: Secret, core: Core, drain: DrainSwitch) -> None:
        self._config = config
        self._secret = secret
        self._core = core
        self._drain = drain
        self.verifier = RequestVerifier(secret, audience=config.epoch)
        self._in_flight: dict[str, asyncio.Task[Any]] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # an ask may come after its own cancel

    async def get_facts(self) -> PeerFacts:
        """Who we are and where our engine core answers the handshake.

        Raises:
            PrefillRefused: 503, the engine core does not answer.
        """
        control = (await self.get_core_status()).get("control", {})
        return PeerFacts(
            role=self._config.role.value,
            engine_id=self._config.engine_id,
            epoch=self._config.epoch,
            host=str(control.get("host", "")),
            port=int(control.get("port", 0)),
            wire_version=WIRE_VERSION,
            draining=self._drain.is_on,
        )

    async def get_core_status(self) -> dict[str, Any]:
        """The engine core's part of /pd/status.

        Raises:
            PrefillRefused: 503, the engine core does not answer.
        """
        try:
            answer = await self._core.request(StatusQuery(), CORE_TIMEOUT_S)
        except PDUnreachableError as error:
            raise PrefillRefused(503, str(error), "pd_core_unreachable") from error
        return answer.status if isinstance(answer, StatusReply) else {}

    async def prefill(self, body: bytes, generate: Callable[[PrefillAsk, dict[str, Any]], Awaitable[Any]]) -> bytes:
        """Compute one ask; the JSON answer. Cancelling it aborts the request.

        Args:
            body: a signed PrefillAsk.
            generate: runs one token of the prompt with these kv_transfer_params; returns the final RequestOutput.

        Raises:
            PDDraining: no new asks are taken.
            PrefillRefused: the ask is malformed, double or cancelled, or ended without a lease.
        """
        self._drain.check()
        try:
            ask = msgspec.json.decode(body, type=PrefillAsk)
        except msgspec.MsgspecError as error:
            raise PrefillRefused(400, f"not a prefill ask: {error}") from error
        if not ask.token_ids:
            raise PrefillRefused(400, "token_ids is empty")
        if ask.transfer_id in self._cancelled:
            raise PrefillRefused(409, f"transfer {ask.transfer_id} was cancelled before it came")
        if ask.transfer_id in self._in_flight:
            raise PrefillRefused(409, f"transfer {ask.transfer_id} is being computed")
        digest = prompt_digest(ask.token_ids)
        params = {
            "do_remote_decode": True,
            "pd_transfer_id": ask.transfer_id,
            "pd_prompt_digest": digest,
            "pd_ask": self._secret.sign("ask", ask_bytes(ask.transfer_id, digest)),
        }
        task = asyncio.ensure_future(generate(ask, params))
        self._in_flight[ask.transfer_id] = task
        try:
            output = await task
        except asyncio.CancelledError:
            task.cancel()
            if ask.transfer_id in self._cancelled:
                raise PrefillRefused(409, f"transfer {ask.transfer_id} was cancelled") from None
            raise
        finally:
            self._in_flight.pop(ask.transfer_id, None)
        return msgspec.json.encode(_read_output(ask, output))

    async def cancel(self, body: bytes) -> None:
        """Stop a prefill that runs in this process, and have the engine core end or refuse its lease.

        Raises:
            PrefillRefused: malformed, or the engine core does not answer.
        """
        try:
            transfer_id = msgspec.json.decode(body, type=CancelAsk).transfer_id
        except msgspec.MsgspecError as error:
            raise PrefillRefused(400, f"not a cancel: {error}") from error
        self._cancelled[transfer_id] = None
        while len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        task = self._in_flight.get(transfer_id)
        if task is not None:
            task.cancel()
        try:
            await self._core.request(CancelTransfer(transfer_id=transfer_id), CORE_TIMEOUT_S)
        except PDUnreachableError as error:
            raise PrefillRefused(503, str(error), "pd_core_unreachable") from error

    def to_status(self) -> dict[str, Any]:
        """For /pd/status: numbers of this API server process alone."""
        return {"prefills_in_flight": len(self._in_flight)}


def _read_output(ask: PrefillAsk, output: Any) -> PrefillAnswer:
    if output is None or not output.outputs or not output.outputs[0].token_ids:
        reason = output.outputs[0].finish_reason if output is not None and output.outputs else None
        raise PrefillRefused(503, f"the prefill of {ask.transfer_id} ended without a token (finish_reason {reason})")
    handoff = from_kv_transfer_params(output.kv_transfer_params or {})
    if handoff is None:
        raise PrefillRefused(
            503, f"no KV could be leased to {ask.transfer_id}; the leases may have reached their limit"
        )
    return PrefillAnswer(
        handoff=handoff,
        first_token_id=int(output.outputs[0].token_ids[0]),
        cached_tokens=int(output.num_cached_tokens or 0),
    )
