# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoints of an instance: /pd/status, /pd/drain; on prefill also /pd/peer, /pd/prefill, /pd/cancel.

Thin: reads the request, checks its signature, calls `server.py`, and writes errors in the server's usual shape.
Imported only when an app is built, because it needs FastAPI; of vLLM it uses the public engine client API.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_ascend_pd.errors import PDAuthError, PDRequestError, PDUnreachableError
from vllm_ascend_pd.front.hooks import instance_of
from vllm_ascend_pd.front.http_messages import (
    CANCEL_PATH,
    DRAIN_PATH,
    MAX_BODY_BYTES,
    PEER_PATH,
    PREFILL_PATH,
    STATUS_PATH,
    PrefillAsk,
)
from vllm_ascend_pd.front.instance import Instance
from vllm_ascend_pd.front.server import CORE_TIMEOUT_S, PrefillRefused, PrefillServer
from vllm_ascend_pd.secret import RequestVerifier
from vllm_ascend_pd.wire import StatusQuery, StatusReply

logger = logging.getLogger(__name__)
router = APIRouter()
_T = TypeVar("_T")


def attach(app: FastAPI) -> None:
    """Add the endpoints and the shape of their errors."""
    app.include_router(router)
    app.exception_handler(PDRequestError)(_answer_error)
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Keep the probes of decode instances, one every few seconds each, out of the access log."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and arguments[2] == PEER_PATH)


@router.get(STATUS_PATH)
async def get_status(request: Request) -> Response:
    """Who this instance is, and what is linked, leased and in flight.

    `api_server` holds numbers of the answering API server process; everything else is the engine core's.
    """
    instance = _instance(request)
    status: dict[str, Any] = {
        "role": instance.config.role.value,
        "engine_id": instance.config.engine_id,
        "epoch": instance.config.epoch,
        "draining": instance.drain.is_on,
    }
    try:
        answer = await instance.core.request(StatusQuery(), CORE_TIMEOUT_S)
        status |= answer.status if isinstance(answer, StatusReply) else {"engine_core": f"answered {answer}"}
        code = 200
    except PDUnreachableError as error:
        status["engine_core"] = str(error)
        code = 503
    status["api_server"] = {"pid": os.getpid(), **instance.to_status()}
    return JSONResponse(status, status_code=code)


@router.post(DRAIN_PATH)
async def post_drain(request: Request) -> Response:
    """Take no new requests from now on, and finish those that are there; `{"draining": false}` takes it back.

    Answers at once; `/pd/status` says what is left. Signed like all of the deployment: `vllm pd drain` sends it.
    """
    instance = _instance(request)
    is_on = instance.drain.turn(await _signed_body(instance.drain.verifier, request, DRAIN_PATH))
    logger.info("pd %s: %s", instance.config.role.value, "draining" if is_on else "takes requests again")
    return JSONResponse({"draining": is_on})


@router.get(PEER_PATH)
async def get_peer(request: Request) -> Response:
    """Public facts that a decode instance needs before the handshake."""
    facts = await _server(request).get_facts()
    return Response(msgspec.json.encode(facts), media_type="application/json")


@router.post(PREFILL_PATH)
async def post_prefill(request: Request) -> Response:
    """Compute a prompt's KV and lease it to the transfer that the signed body names."""
    server = _server(request)
    body = await _signed_body(server.verifier, request, PREFILL_PATH)
    engine = request.app.state.engine_client

    async def generate(ask: PrefillAsk, params: dict[str, Any]) -> Any:
        return await _generate_one(engine, ask, params)

    answer = await _until_disconnect(request, server.prefill(body, generate))
    return Response(answer, media_type="application/json")


@router.post(CANCEL_PATH)
async def post_cancel(request: Request) -> Response:
    """The decode side's request is gone."""
    server = _server(request)
    await server.cancel(await _signed_body(server.verifier, request, CANCEL_PATH))
    return JSONResponse({"cancelled": True})


# ---------------------------------------------------------------- plumbing


async def _answer_error(_: Request, error: Exception) -> Response:
    status = getattr(error, "http_status", 500)
    body = {"message": str(error), "type": getattr(error, "code", "pd_error"), "param": None, "code": status}
    return JSONResponse({"error": body}, status_code=status)


def _instance(request: Request) -> Instance:
    instance = instance_of(request.app.state.engine_client)
    if instance is None:
        raise PrefillRefused(404, "this server runs without --pd-role", "pd_off")
    return instance


def _server(request: Request) -> PrefillServer:
    server = _instance(request).server
    if server is None:
        raise PrefillRefused(
            404, "this is a --pd-role decode instance; prefill ones have this endpoint", "pd_wrong_role"
        )
    return server


async def _signed_body(verifier: RequestVerifier, request: Request, path: str) -> bytes:
    """The body, bounded while it is read, and only if a holder of the secret has sent it to this process life."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise PrefillRefused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    body = b"".join(chunks)
    try:
        verifier.verify("POST", path, request.headers, body)
    except PDAuthError as error:
        raise PrefillRefused(401, str(error), "pd_unauthorized") from error
    return body


async def _until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Await `work`, cancelled when the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise PrefillRefused(499, "the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _generate_one(engine: Any, ask: PrefillAsk, params: dict[str, Any]) -> Any:
    """One token of the prompt; the final RequestOutput."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    prompt = TokensPrompt(prompt_token_ids=ask.token_ids)
    if ask.cache_salt is not None:
        prompt["cache_salt"] = ask.cache_salt
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": params},
    )
    final = None
    async for output in engine.generate(prompt, sampling, f"pd-{ask.transfer_id}", priority=ask.priority):
        final = output
    return final
