# SPDX-License-Identifier: Apache-2.0
"""Clients of a control server: `ControlClient` for threads, `AsyncControlClient` for an API server's event loop.

A request is sent again under the same id after a share of its timeout; all messages are idempotent, and late or
double answers are dropped by id. Reconnecting after a restart of the other side is libzmq's work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import threading
import time
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from vllm_ascend_pd.control.endpoint import (
    REQUEST_ID_BYTES,
    explain_silence,
    is_tcp,
    join_tcp,
    resolve,
    set_client_curve,
    set_common_options,
    split_tcp,
)
from vllm_ascend_pd.errors import PDUnreachableError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import MAX_FRAME_BYTES, Answer, LocalMessage, PeerMessage

logger = logging.getLogger(__name__)

RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 2000
MAX_IDLE_SOCKETS: Final = 8

Message = LocalMessage | PeerMessage
_DECODER: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


class ControlClient:
    """Blocking requests to one control server; any number of threads, each with a socket of its own for the while.

    Makes its zmq context at the first request, and a new one in a forked child.
    """

    def __init__(self, endpoint: str, secret: Secret | None = None) -> None:
        self.endpoint = _with_scheme(endpoint)
        self._secret = secret
        self._lock = threading.Lock()  # guards everything below
        self._idle: list[Any] = []
        self._busy = 0
        self._context: Any = None
        self._pid = 0
        self._closed = False

    def request(self, message: Message, timeout_s: float, attempts: int = 3) -> Answer:
        """Send and wait; the message is sent `attempts` times in all, evenly over `timeout_s`.

        Raises:
            PDUnreachableError: no answer within `timeout_s`; names the address and what to check.
        """
        payload = _encode(message)
        sock = self._take_socket()
        reusable = False
        try:
            answer = self._exchange(sock, payload, timeout_s, max(1, attempts))
            reusable = answer is not None
        finally:
            self._give_socket(sock, reusable)
        if answer is None:
            raise _unreachable(self.endpoint, timeout_s, attempts, explain_silence(self.endpoint))
        return _decode(answer, self.endpoint)

    def close(self) -> None:
        """Drop the connections; requests that are under way end by themselves."""
        with self._lock:
            self._closed = True
            for sock in self._idle:
                sock.close(0)
            self._idle.clear()
            self._end_context()

    def _exchange(self, sock: Any, payload: bytes, timeout_s: float, attempts: int) -> bytes | None:
        request_id = secrets.token_bytes(REQUEST_ID_BYTES)
        started = time.monotonic()
        for attempt in range(1, attempts + 1):
            until = started + timeout_s * attempt / attempts
            sock.send_multipart([request_id, payload], zmq.NOBLOCK)
            while (left := until - time.monotonic()) > 0:
                if not sock.poll(math.ceil(1000 * left)):
                    continue
                frames = sock.recv_multipart()
                if len(frames) == 2 and frames[0] == request_id:
                    return bytes(frames[1])
        return None

    def _take_socket(self) -> Any:
        with self._lock:
            if self._closed:
                raise PDUnreachableError(f"{self.endpoint}: this client has been closed")
            if self._pid != os.getpid():
                # A forked child must not touch its parent's sockets; pyzmq leaves them alone when collected.
                self._pid, self._context, self._idle, self._busy = os.getpid(), zmq.Context(), [], 0
            self._busy += 1
            if self._idle:
                return self._idle.pop()
            context = self._context
        try:
            return _connect(context, self.endpoint, self._secret)
        except BaseException:
            self._give_socket(None, False)
            raise

    def _give_socket(self, sock: Any, reusable: bool) -> None:
        with self._lock:
            self._busy -= 1
            if reusable and not self._closed and len(self._idle) < MAX_IDLE_SOCKETS:
                self._idle.append(sock)
            elif sock is not None:
                sock.close(0)
            self._end_context()

    def _end_context(self) -> None:
        """Under the lock. Ending a context waits for its sockets, so the last one to leave does it."""
        if self._closed and not self._busy and self._context is not None and self._pid == os.getpid():
            self._context.term()
            self._context = None


class AsyncControlClient:
    """Many outstanding requests over one connection, for one event loop. An answer may take minutes."""

    def __init__(self, endpoint: str, secret: Secret | None = None) -> None:
        self.endpoint = _with_scheme(endpoint)
        self._secret = secret
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._context: Any = None
        self._sock: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._starting: asyncio.Lock | None = None
        self._closed = False

    async def request(self, message: Message, timeout_s: float, attempts: int = 3) -> Answer:
        """As `ControlClient.request`. Cancelling it forgets the request; the server is not told.

        Raises:
            PDUnreachableError: no answer within `timeout_s`, or the client was closed meanwhile.
        """
        payload = _encode(message)
        await self._start()
        attempts = max(1, attempts)
        loop = asyncio.get_running_loop()
        request_id = secrets.token_bytes(REQUEST_ID_BYTES)
        answered: asyncio.Future[bytes] = loop.create_future()
        self._waiting[request_id] = answered
        started = loop.time()
        try:
            for attempt in range(1, attempts + 1):
                until = started + timeout_s * attempt / attempts
                await self._send([request_id, payload])
                await asyncio.wait({answered}, timeout=max(0.0, until - loop.time()))
                if answered.done():
                    return _decode(answered.result(), self.endpoint)
        finally:
            self._waiting.pop(request_id, None)
            answered.cancel()
        reason = await asyncio.to_thread(explain_silence, self.endpoint)
        raise _unreachable(self.endpoint, timeout_s, attempts, reason)

    def close(self) -> None:
        """Drop the connection; outstanding requests raise. In the event loop's thread."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(PDUnreachableError(f"{self.endpoint}: this client has been closed"))
        if self._sock is not None:
            self._sock.close(0)
        if self._context is not None:
            self._context.term()
        self._sock = self._context = self._reader = None

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._closed:
                raise PDUnreachableError(f"{self.endpoint}: this client has been closed")
            if self._sock is not None:
                return
            host = split_tcp(self.endpoint)[0] if is_tcp(self.endpoint) else ""
            literal = await asyncio.to_thread(_resolve_or_raise, host, self.endpoint) if host else ""
            context = zmq.asyncio.Context()
            try:
                self._sock = _connect(context, self.endpoint, self._secret, literal)
            except BaseException:
                context.term()
                raise
            self._context = context
            self._reader = asyncio.create_task(self._read(self._sock), name="pd-control-reader")

    async def _send(self, frames: list[bytes]) -> None:
        if self._sock is not None:  # None: closed meanwhile, and the future already holds the error
            # Never waits: the queue has no limit (`_connect`). No `asyncio.wait_for` here: before Python 3.12 it
            # can swallow a cancellation that comes when its inner future has just ended.
            await self._sock.send_multipart(frames, zmq.NOBLOCK)

    async def _read(self, sock: Any) -> None:
        while True:
            try:
                frames = await sock.recv_multipart()
            except zmq.ZMQError as error:
                if self._closed:
                    return
                logger.warning("%s: receiving failed: %s", self.endpoint, error)
                await asyncio.sleep(RECONNECT_MS / 1000)
                continue
            answered = self._waiting.get(frames[0]) if len(frames) == 2 else None
            if answered is not None and not answered.done():
                answered.set_result(frames[1])


def _with_scheme(endpoint: str) -> str:
    return endpoint if "://" in endpoint else f"ipc://{endpoint}"


def _encode(message: Message) -> bytes:
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    return payload


def _decode(payload: bytes, endpoint: str) -> Answer:
    try:
        return _DECODER.decode(payload)
    except Exception as error:
        raise PDUnreachableError(f"{endpoint} answers in another protocol: {str(error)[:200]}") from error


def _resolve_or_raise(host: str, endpoint: str) -> str:
    try:
        return resolve(host)
    except OSError as error:
        raise PDUnreachableError(f"{endpoint}: host {host!r} does not resolve: {error.strerror}") from error


def _connect(context: Any, endpoint: str, secret: Secret | None, literal: str = "") -> Any:
    """A DEALER towards `endpoint`; may block on DNS unless `literal` says what its host resolves to."""
    target, ipv6 = endpoint, False
    if is_tcp(endpoint):
        host, port = split_tcp(endpoint)
        literal = literal or _resolve_or_raise(host, endpoint)
        target, ipv6 = join_tcp(literal, port), ":" in literal
    sock = context.socket(zmq.DEALER)
    try:
        set_common_options(sock, 0, is_tcp(endpoint))
        sock.setsockopt(zmq.SNDHWM, 0)  # bounded by the requests under way and their attempts
        sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        sock.setsockopt(zmq.IPV6, int(ipv6))
        if secret is not None and is_tcp(endpoint):
            set_client_curve(sock, secret)
        sock.connect(target)
    except BaseException:
        sock.close(0)
        raise
    return sock


def _unreachable(endpoint: str, timeout_s: float, attempts: int, reason: str) -> PDUnreachableError:
    times = "once" if attempts == 1 else f"{attempts} times"
    return PDUnreachableError(f"{endpoint} did not answer within {timeout_s:g} s (asked {times}): {reason}")
