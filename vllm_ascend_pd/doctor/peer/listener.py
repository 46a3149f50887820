# SPDX-License-Identifier: Apache-2.0
"""The doctor that answers: a control server like an engine core's, and the data plane of one session at a time.

Questions arrive in the control thread; all but a ping are answered by one worker thread ("pd-doctor"), in order. Only
holders of the deployment's secret get that far, so the address in a `DialBack` is a colleague's. Sessions end by
`Close`, or when nothing was heard for a while; then nothing of them is left.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.control.endpoint import join_tcp
from vllm_ascend_pd.control.server import ControlServer, Handler, Reply
from vllm_ascend_pd.doctor.peer.messages import (
    PROTOCOL,
    Close,
    Closed,
    DialBack,
    DialedBack,
    Open,
    Opened,
    Ping,
    Pong,
    PullBack,
    read_body,
    write_body,
)
from vllm_ascend_pd.doctor.peer.path import look_at
from vllm_ascend_pd.doctor.peer.plane import MAX_BYTES, ROUNDS, DoctorPlane, Geometry, PlaneError, work_seconds
from vllm_ascend_pd.errors import PDError, PDUnreachableError
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import Answer, DoctorAsk, DoctorReply, Refused

logger = logging.getLogger(__name__)

IDLE_MARGIN_S: Final = 10.0
MAX_TIMEOUT_S: Final = 300.0
PINGS: Final = 5
UNKNOWN: Final = "?"  # who closes a session that is not open

Event = Mapping[str, Any]
MakePlane = Callable[[Geometry, float], DoctorPlane]


class NoDoctorError(PDUnreachableError):
    """Something with the same secret answers, and it is not a doctor."""


def ping(client: ControlClient, timeout_s: float, count: int = PINGS) -> float:
    """The shortest way there and back, in ms. Raises PDUnreachableError."""
    best = float("inf")
    for number in range(count):
        started = time.perf_counter()
        answer = client.request(DoctorAsk(verb="ping", body=write_body(Ping(nonce=str(number)))), timeout_s)
        best = min(best, 1000 * (time.perf_counter() - started))
        if not isinstance(answer, DoctorReply):
            raise NoDoctorError(f"{client.endpoint} is no doctor: it answers {answer}")
    return best


class Session:
    """What is kept of one visitor."""

    def __init__(self, opened: Open) -> None:
        self.id = opened.session
        self.visitor = str(opened.facts.get("host", UNKNOWN))
        self.timeout_s = min(MAX_TIMEOUT_S, max(1.0, opened.timeout_ms / 1000))
        work_s = work_seconds(min(MAX_BYTES, max(0, opened.num_bytes)))
        self._silence_s = 2 * self.timeout_s + ROUNDS * work_s + IDLE_MARGIN_S  # a visitor makes and compares, too
        self.plane: DoctorPlane | None = None
        self.jobs: dict[str, Future[Answer]] = {}  # control thread only; a question that comes again joins its job
        self.last_heard = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether its visitor has gone without a word."""
        busy = any(not job.done() for job in self.jobs.values())
        return not busy and time.monotonic() - self.last_heard > self._silence_s


class DoctorListener:
    """`start` binds; `close` ends all. `on_event` is called in the worker thread, for people and JSON."""

    def __init__(
        self,
        secret: Secret,
        listen: tuple[str, int],
        advertise_host: str,
        facts: dict[str, Any],
        on_event: Callable[[Event], None] = lambda event: None,
        transport: str = "auto",
    ) -> None:
        self._secret = secret
        self._facts = facts
        self._on_event = on_event
        self._session: Session | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pd-doctor")
        self._folder = tempfile.mkdtemp(prefix="vllm-pd-doctor-")
        self.make_plane: MakePlane = lambda geometry, timeout_s: DoctorPlane(
            secret, advertise_host, geometry, timeout_s, transport
        )
        endpoint = join_tcp("*" if listen[0] == "0.0.0.0" else listen[0], listen[1])
        handlers: dict[type[msgspec.Struct], Handler] = {DoctorAsk: self._on_ask}
        self._server = ControlServer(f"{self._folder}/core.sock", endpoint, secret, handlers, tick=self._tick)
        self.port = 0

    def start(self) -> int:
        """Listen; returns the port. Raises PDConfigError when the address cannot be bound."""
        self._server.start()
        self.port = self._server.peer_port
        return self.port

    def close(self) -> None:
        """Stop listening, end the session, wait for what runs (bounded by its own deadlines)."""
        self._server.close()
        session, self._session = self._session, None
        if session is not None:
            self._worker.submit(self._end, session)
        self._worker.shutdown(wait=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---------------------------------------------------------------- control thread

    def _on_ask(self, message: DoctorAsk, reply: Reply) -> None:
        if message.verb == "ping":
            nonce = read_body(message.body, Ping).nonce
            reply.send(DoctorReply(body=write_body(Pong(nonce=nonce))))
            return
        try:
            session = self._session_of(message)
        except PDError as error:
            reply.send(Refused(code="doctor", message=str(error)))
            return
        session.last_heard = time.monotonic()
        job = session.jobs.get(message.verb)
        if job is None:
            job = session.jobs[message.verb] = self._worker.submit(self._answer, session, message)
        if message.verb == "close" and session is self._session:
            self._session = None
        job.add_done_callback(lambda done: reply.send(done.result()))
        if message.verb == "close":  # after the answer: who waits for this event may end the process
            job.add_done_callback(lambda done: self._tell_done(session, message))

    def _session_of(self, message: DoctorAsk) -> Session:
        """The session that a question belongs to; a new one for `open`. Raises PDUnreachableError."""
        asked_id = str(message.body.get("session", ""))
        if self._session is not None and self._session.id == asked_id:
            return self._session
        if message.verb == "close":
            return Session(Open(protocol=PROTOCOL, session=asked_id, num_bytes=0, timeout_ms=1000, facts={}))
        if message.verb != "open":
            raise PDUnreachableError("this session is over, or was never opened")
        opened = read_body(message.body, Open)
        if opened.protocol != PROTOCOL:
            raise PDUnreachableError(f"doctor protocol: {PROTOCOL} here, {opened.protocol} there; use one release")
        if self._session is not None:
            raise PDUnreachableError(f"busy with a doctor on {self._session.visitor}; try again in a minute")
        self._session = Session(opened)
        return self._session

    def _tick(self) -> None:
        session = self._session
        if session is not None and session.is_idle:
            self._session = None
            self._worker.submit(self._lose, session)

    # ---------------------------------------------------------------- worker thread

    def _answer(self, session: Session, message: DoctorAsk) -> Answer:
        answerers: dict[str, Callable[[Session, dict[str, Any]], msgspec.Struct]] = {
            "open": self._open,
            "dial": self._dial,
            "pull": self._pull,
            "close": self._close,
        }
        answerer = answerers.get(message.verb)
        if answerer is None:
            return Refused(code="doctor", message=f"unknown verb {message.verb!r}; use one release on both sides")
        try:
            return DoctorReply(body=write_body(answerer(session, message.body)))
        except Exception as error:  # the visitor is told; this doctor goes on
            logger.debug("verb %s failed", message.verb, exc_info=True)
            return Refused(code="doctor", message=f"{message.verb}: {type(error).__name__}: {error}"[:300])

    def _open(self, session: Session, body: dict[str, Any]) -> Opened:
        opened = read_body(body, Open)
        self._on_event({"event": "visit", "visitor": session.visitor})
        if not 0 < opened.num_bytes <= MAX_BYTES:
            return Opened(facts=self._facts, plane=None, reason=f"--bytes is above {MAX_BYTES >> 20} MiB")
        plane = self.make_plane(Geometry.of(opened.num_bytes), session.timeout_s)
        session.plane = plane
        try:
            return Opened(facts=self._facts, plane=plane.start())
        except PDError as error:
            plane.close()
            session.plane = None
            return Opened(facts=self._facts, plane=None, reason=str(error))

    def _dial(self, session: Session, body: dict[str, Any]) -> DialedBack:
        asked = read_body(body, DialBack)
        path = look_at(asked.host, asked.port, session.timeout_s)
        if path.problem:
            return DialedBack(problem=path.problem)
        client = ControlClient(join_tcp(asked.host, asked.port), self._secret)
        try:
            return DialedBack(rtt_ms=ping(client, session.timeout_s), mtu=path.mtu)
        except PDUnreachableError as error:
            return DialedBack(problem=str(error))
        finally:
            client.close()

    def _pull(self, session: Session, body: dict[str, Any]) -> msgspec.Struct:
        asked = read_body(body, PullBack)
        if session.plane is None:
            raise PlaneError("there is no data plane here")
        pulled = session.plane.pull(asked.plane)
        self._on_event({"event": "pulled", "visitor": session.visitor, **msgspec.to_builtins(pulled)})
        return pulled

    def _close(self, session: Session, body: dict[str, Any]) -> Closed:
        self._end(session)
        return Closed()

    def _tell_done(self, session: Session, message: DoctorAsk) -> None:
        asked = read_body(message.body, Close)
        if session.visitor != UNKNOWN:
            self._on_event({"event": "done", "visitor": session.visitor, "ok": asked.ok, "summary": asked.summary})

    def _lose(self, session: Session) -> None:
        summary = "the visitor has gone without a word"
        self._on_event({"event": "done", "visitor": session.visitor, "ok": False, "summary": summary})
        self._end(session)

    def _end(self, session: Session) -> None:
        plane, session.plane = session.plane, None
        if plane is not None:
            plane.close()
