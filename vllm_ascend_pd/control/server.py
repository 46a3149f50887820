# SPDX-License-Identifier: Apache-2.0
"""The control server of one engine core: one thread ("pd-control") that answers both planes.

The local plane is a Unix socket in the instance's private directory (its own API servers). The peer plane is TCP with
CURVE: only holders of the deployment's secret get as far as a frame. Handlers run in this thread and must not block;
one that has to wait keeps its `Reply` and sends it later from any thread. The engine thread never waits for us.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq

from vllm_ascend_pd.control.endpoint import (
    REQUEST_ID_BYTES,
    ipc_path,
    join_tcp,
    resolve,
    set_common_options,
    split_tcp,
)
from vllm_ascend_pd.control.outbox import Outbox
from vllm_ascend_pd.control.zap import ZapGate
from vllm_ascend_pd.errors import PDConfigError, PDPortTakenError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import MAX_FRAME_BYTES, Answer, LocalMessage, PeerMessage, Refused

logger = logging.getLogger(__name__)

MAX_BEAT_S: Final = 0.25
MAX_TICK_S: Final = 0.1
BATCH: Final = 64  # messages of one plane before the other plane, the tick and the beat get their turn
LINGER_MS: Final = 200
LOG_EVERY_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
MAX_ERROR_CHARS: Final = 300


class Reply:
    """The way back to one request. One-shot and thread-safe; sending after the server has closed does nothing."""

    def __init__(self, put: Callable[[list[bytes]], None], envelope: tuple[bytes, bytes]) -> None:
        self._put = put
        self._envelope = envelope
        self._lock = threading.Lock()
        self._sent = False

    @property
    def sent(self) -> bool:
        """Whether an answer has been given."""
        return self._sent

    def send(self, answer: Answer) -> bool:
        """Answer the request; False when it had been answered before (the first answer stands)."""
        payload = msgspec.msgpack.encode(answer)
        if len(payload) > MAX_FRAME_BYTES:
            refused = Refused(code="too_large", message=f"the answer has {len(payload)} bytes, over {MAX_FRAME_BYTES}")
            payload = msgspec.msgpack.encode(refused)
        with self._lock:
            if self._sent:
                return False
            self._sent = True
        self._put([*self._envelope, payload])
        return True


Handler = Callable[[Any, Reply], object]


@dataclass(frozen=True)
class _Plane:
    name: str
    sock: Any
    decoder: msgspec.msgpack.Decoder[Any]


class ControlServer:
    """Binds in `start()`, serves until `close()`.

    Args:
        local_path: the Unix socket, as a path or `ipc://` endpoint.
        peer_endpoint: `tcp://host:port`, port 0 or `*` for a free one; None for no peer plane.
        handlers: by message type; each is called as `handler(message, reply)` in the server's thread.
        tick: called in the server's thread at least every 100 ms; may return the monotonic time of an earlier call.
    """

    def __init__(
        self,
        local_path: str,
        peer_endpoint: str | None,
        secret: Secret,
        handlers: Mapping[type[msgspec.Struct], Handler],
        tick: Callable[[], float | None] | None = None,
    ) -> None:
        self._local_path = ipc_path(str(local_path))
        self._peer_endpoint = peer_endpoint
        self._secret = secret
        self._handlers = dict(handlers)
        self._tick = tick
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._outbox: Outbox[tuple[_Plane, list[bytes]]] | None = None
        self._last_logged: dict[str, float] = {}
        self.peer_port = 0
        self.last_beat = 0.0
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Bind both planes and start the thread. Everything of zmq is made here: a fork before it is harmless.

        Raises:
            PDConfigError: an address that cannot be bound.
        """
        if self._thread is not None:
            raise RuntimeError("a ControlServer starts once")
        context = zmq.Context()
        sockets: list[Any] = []
        try:
            # The gate is bound before the peer socket: a connection without a verdict would be let in.
            gate = ZapGate(context, {self._secret.curve_client_keys()[0]}, self.counters)
            sockets.append(gate.sock)
            planes = [self._bind_local(context, sockets)]
            if self._peer_endpoint is not None:
                planes.append(self._bind_peer(context, self._peer_endpoint, sockets))
        except BaseException:
            for sock in sockets:
                sock.close(0)
            context.term()
            raise
        self._outbox = Outbox()
        self.last_beat = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(context, planes, gate, self._outbox), name="pd-control", daemon=True
        )
        self._thread.start()

    def alive(self) -> bool:
        """Whether the thread runs; `last_beat` says when it last came round."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Send what has been answered, stop the thread and join it. Any thread but the server's own."""
        self._stopping.set()
        if self._outbox is not None:
            self._outbox.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- start: binding

    def _bind_local(self, context: Any, sockets: list[Any]) -> _Plane:
        sock = context.socket(zmq.ROUTER)
        sockets.append(sock)
        set_common_options(sock, LINGER_MS, tcp=False)
        try:
            sock.bind(f"ipc://{self._local_path}")
            os.chmod(self._local_path, 0o600)
        except (zmq.ZMQError, OSError) as error:
            raise PDConfigError(
                f"control socket {self._local_path}: cannot be bound: {error.strerror} (the directory has to exist "
                "and be ours; a Unix socket's path has at most 107 bytes)"
            ) from error
        return _Plane("local", sock, msgspec.msgpack.Decoder(LocalMessage))

    def _bind_peer(self, context: Any, endpoint: str, sockets: list[Any]) -> _Plane:
        try:
            host, port = split_tcp(endpoint)
            literal = "*" if host == "*" else resolve(host)
        except (ValueError, OSError) as error:
            raise PDConfigError(f"--pd-listen: {endpoint}: {error}") from error
        sock = context.socket(zmq.ROUTER)
        sockets.append(sock)
        set_common_options(sock, LINGER_MS, tcp=True)
        # IPv6 only where it is asked for: an IPv4 host without IPv6 must not need it.
        sock.setsockopt(zmq.IPV6, int(":" in literal))
        public_key, secret_key = self._secret.curve_server_keys()
        sock.curve_server = True
        sock.curve_publickey = public_key
        sock.curve_secretkey = secret_key
        sock.zap_domain = b"vllm-pd"
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the gate nobody gets in
        try:
            sock.bind(join_tcp(literal, "*" if port in ("0", "*") else port))
        except zmq.ZMQError as error:
            kind = PDPortTakenError if error.errno == errno.EADDRINUSE else PDConfigError
            raise kind(_bind_problem(host, port, error)) from error
        self.peer_port = int(split_tcp(sock.getsockopt_string(zmq.LAST_ENDPOINT))[1])
        return _Plane("peer", sock, msgspec.msgpack.Decoder(PeerMessage))

    # ---------------------------------------------------------------- any thread

    def _put(self, plane: _Plane, frames: list[bytes]) -> None:
        assert self._outbox is not None  # there are no requests before start
        self._outbox.put((plane, frames))
        self._outbox.wake()

    # ---------------------------------------------------------------- control thread

    def _run(
        self, context: Any, planes: list[_Plane], gate: ZapGate, outbox: Outbox[tuple[_Plane, list[bytes]]]
    ) -> None:
        poller = zmq.Poller()
        for sock in [gate.sock, *(plane.sock for plane in planes), outbox.sleeper]:
            poller.register(sock, zmq.POLLIN)
        next_tick = 0.0
        try:
            while not self._stopping.is_set():
                now = time.monotonic()
                self.last_beat = now
                if now >= next_tick:
                    next_tick = self._call_tick(now)
                self._flush(outbox)
                wait_s = min(MAX_BEAT_S, max(0.0, next_tick - time.monotonic()))
                ready = dict(poller.poll(math.ceil(1000 * wait_s)))
                if gate.sock in ready:
                    gate.answer()
                if outbox.sleeper.fileno() in ready:
                    outbox.clear_wakes()
                for plane in planes:
                    if plane.sock in ready:
                        self._serve(plane, next_tick)
            self._flush(outbox)
        except Exception:
            logger.critical("the control thread has died; this instance is no longer healthy", exc_info=True)
            raise
        finally:
            for sock in [gate.sock, *(plane.sock for plane in planes)]:
                sock.close()  # lingers as set
            outbox.close()
            with contextlib.suppress(OSError):
                os.unlink(self._local_path)  # libzmq leaves it; a client then sees at once that nobody is there
            context.term()

    def _call_tick(self, now: float) -> float:
        latest = now + MAX_TICK_S
        if self._tick is None:
            return latest
        try:
            wanted = self._tick()
        except Exception:
            self.counters["tick_errors"] += 1
            self._log_error("tick", "the control thread's tick failed")
            return latest
        return latest if wanted is None else min(latest, wanted)

    def _serve(self, plane: _Plane, until: float) -> None:
        """Answer what is there: at most a batch, and at least one message however late the next tick is."""
        for _ in range(BATCH):
            try:
                frames = plane.sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(plane, frames)
            if time.monotonic() >= until:
                return

    def _answer(self, plane: _Plane, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != REQUEST_ID_BYTES:
            self._count_malformed(plane, f"{len(frames)} frames")
            return
        reply = Reply(lambda answer: self._put(plane, answer), (frames[0], frames[1]))
        try:
            message = plane.decoder.decode(frames[2])
        except Exception as error:  # msgspec's own errors, and RecursionError from deeply nested input
            detail = str(error)[:MAX_ERROR_CHARS]
            self._count_malformed(plane, detail)
            reply.send(Refused(code="malformed", message=f"not a message of the {plane.name} plane: {detail}"))
            return
        self.counters[f"{plane.name}_requests"] += 1
        handler = self._handlers.get(type(message))
        tag = type(message).__struct_config__.tag
        if handler is None:
            reply.send(Refused(code="unsupported", message=f"this engine core does not answer {tag!r}"))
            return
        try:
            handler(message, reply)
        except Exception as error:
            self.counters["handler_errors"] += 1
            self._log_error(f"handler {tag}", f"control message {tag!r} failed")
            reply.send(Refused(code="internal", message=f"{tag}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]))

    def _flush(self, outbox: Outbox[tuple[_Plane, list[bytes]]]) -> None:
        while (item := outbox.take()) is not None:
            plane, frames = item
            try:
                plane.sock.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError as error:  # a full or vanished peer; it asks again
                self.counters["unsent_answers"] += 1
                logger.debug("an answer on the %s plane was not sent: %s", plane.name, error)

    def _count_malformed(self, plane: _Plane, detail: str) -> None:
        self.counters["malformed"] += 1
        self.counters[f"{plane.name}_malformed"] += 1
        if self._may_log(f"malformed {plane.name}"):
            logger.warning("refused a malformed frame on the %s plane: %r", plane.name, detail)

    def _may_log(self, what: str) -> bool:
        """At most once per `LOG_EVERY_S` and kind, so that a broken peer cannot fill the disk."""
        now = time.monotonic()
        if now - self._last_logged.get(what, -LOG_EVERY_S) < LOG_EVERY_S:
            return False
        self._last_logged[what] = now
        return True

    def _log_error(self, kind: str, text: str) -> None:
        if self._may_log(kind):
            logger.exception("%s", text)


def _bind_problem(host: str, port: str, error: zmq.ZMQError) -> str:
    hints = {
        errno.EADDRINUSE: "another process has this port; give another one, or none for a free one",
        errno.EADDRNOTAVAIL: "this machine has no such address",
        errno.ENODEV: "this machine has no such address",
        errno.EACCES: "ports below 1024 need privileges",
    }
    hint = hints.get(error.errno or 0, "")
    return f"--pd-listen {host}:{port}: cannot listen on host {host} port {port}: {error.strerror}" + (
        f" ({hint})" if hint else ""
    )
