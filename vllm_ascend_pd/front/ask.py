# SPDX-License-Identifier: Apache-2.0
"""The prefill client: ask a prefill instance over HTTP, cancel there, and learn who it is.

Runs in a decode instance's API server, on its event loop. Each failure is an `AskFailed` with a reason that
becomes a metric label. Cancelling the task closes the connection, which aborts the prefill; `cancel` says so
once more by name, for a prefill that had just ended.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final, TypeVar

import httpx
import msgspec

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.front.http_messages import (
    CANCEL_PATH,
    PEER_PATH,
    PREFILL_PATH,
    CancelAsk,
    ErrorBody,
    PeerFacts,
    PrefillAnswer,
    PrefillAsk,
)
from vllm_ascend_pd.secret import Secret, sign_request

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 3.0
PROBE_TIMEOUT_S: Final = 5.0
CANCEL_TRIES: Final = 4
KEEP_ALIVE_S: Final = 3.0  # below the 5 s after which upstream's server closes an idle connection
MAX_ANSWER_BYTES: Final = 8 << 20

_Body = TypeVar("_Body", PrefillAnswer, PeerFacts)


class AskFailed(PDError):
    """No handoff. `reason` is a short word, used as a metric label."""

    def __init__(self, reason: str, detail: str, *, is_final: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.is_final = is_final  # the request itself is at fault: no instance will take it


class AskClient:
    """HTTP to prefill instances. One per event loop; `aclose` when done."""

    def __init__(self, secret: Secret, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._secret = secret
        # No proxies and no cookies from the environment: instances are dialled directly.
        self._http = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            verify=ssl.create_default_context(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def ask(self, url: str, epoch: str, ask: PrefillAsk, timeout_s: float) -> PrefillAnswer:
        """Have a prompt computed by the instance of that epoch; returns when its KV is leased to us.

        Raises:
            AskFailed: see its fields.
        """
        answer = await self._post(url, PREFILL_PATH, epoch, msgspec.json.encode(ask), timeout_s)
        return _decode(answer, PrefillAnswer, url)

    async def cancel(self, url: str, epoch: str, transfer_id: str) -> bool:
        """Tell a prefill instance that nobody will read this transfer. Tries a few times; never raises."""
        body = msgspec.json.encode(CancelAsk(transfer_id=transfer_id))
        for attempt in range(CANCEL_TRIES):
            try:
                await self._post(url, CANCEL_PATH, epoch, body, PROBE_TIMEOUT_S)
                return True
            except AskFailed as error:
                logger.debug("transfer_id=%s: cancel at %s: %s", transfer_id, url, error)
                if error.is_final or error.reason == "unauthorized":
                    break  # it was restarted: the lease is gone with its old life
            await asyncio.sleep(0.2 * 2**attempt)
        logger.info("transfer_id=%s: could not cancel at %s; its lease there ends by itself", transfer_id, url)
        return False

    async def get_peer(self, url: str) -> PeerFacts:
        """Who answers at this URL.

        Raises:
            AskFailed: nobody, or something that is not a prefill instance.
        """
        answer = await self._request("GET", url + PEER_PATH, b"", dict, PROBE_TIMEOUT_S)
        return _decode(answer, PeerFacts, url)

    async def _post(self, url: str, path: str, epoch: str, body: bytes, timeout_s: float) -> bytes:
        def headers() -> dict[str, str]:  # a signature serves once
            return sign_request(self._secret, "POST", path, body, epoch) | {"content-type": "application/json"}

        return await self._request("POST", url + path, body, headers, timeout_s)

    async def _request(
        self, method: str, url: str, body: bytes, headers: Callable[[], dict[str, str]], timeout_s: float
    ) -> bytes:
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))

        async def exchange() -> httpx.Response:
            try:
                return await self._http.request(method, url, content=body, headers=headers(), timeout=timeout)
            except httpx.RemoteProtocolError:
                # A kept connection that the server closed at the same moment. Asks are idempotent.
                return await self._http.request(method, url, content=body, headers=headers(), timeout=timeout)

        try:
            # httpx's read timeout restarts with every byte; the whole exchange must end in time.
            response = await asyncio.wait_for(exchange(), timeout_s)
        except (asyncio.TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            raise AskFailed("timeout", f"{url} did not answer within {timeout_s:.1f} s") from None
        except (httpx.HTTPError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise AskFailed("unreachable", f"{url} does not answer: {detail}") from error
        if response.status_code == 200:
            return response.content
        raise _refusal(url, response)


def _refusal(url: str, response: httpx.Response) -> AskFailed:
    status = response.status_code
    path = httpx.URL(url).path
    try:
        error: dict[str, Any] = msgspec.json.decode(response.content[:MAX_ANSWER_BYTES], type=ErrorBody).error
        message = str(error.get("message", ""))
    except msgspec.MsgspecError:
        message = response.text[:200]
    detail = f"{url} answered HTTP {status}: {message}"
    if status in (429, 503):
        return AskFailed("busy", detail)
    if status in (401, 403):
        return AskFailed("unauthorized", detail)
    if status == 404:
        return AskFailed("not_prefill", f"{url} does not exist: is {path} served by `vllm serve --pd-role prefill`?")
    if 400 <= status < 500:
        return AskFailed("rejected", detail, is_final=True)
    return AskFailed("failed", detail)


def _decode(content: bytes, kind: type[_Body], url: str) -> _Body:
    if len(content) > MAX_ANSWER_BYTES:
        raise AskFailed("bad_answer", f"{url} answered {len(content)} bytes; the limit is {MAX_ANSWER_BYTES}")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise AskFailed("bad_answer", f"{url} answered something else than {kind.__name__}: {error}") from error
