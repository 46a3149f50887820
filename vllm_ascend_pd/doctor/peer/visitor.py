# SPDX-License-Identifier: Apache-2.0
"""The doctor that asks: from the first TCP connection to a verified transfer in both directions, one check each.

Stops where going on makes no sense, and says so. Runs in the command's main thread; every step has a deadline, and
both ends are closed whatever happens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_ascend_pd.config import is_loopback
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.control.endpoint import join_tcp
from vllm_ascend_pd.doctor.check import Check, State, fail, not_applicable, ok, warn
from vllm_ascend_pd.doctor.peer import facts as host_facts
from vllm_ascend_pd.doctor.peer.listener import DoctorListener, NoDoctorError, ping
from vllm_ascend_pd.doctor.peer.messages import (
    PROTOCOL,
    Body,
    Close,
    Closed,
    DialBack,
    DialedBack,
    Open,
    Opened,
    PlaneAddress,
    PullBack,
    Pulled,
    read_body,
    write_body,
)
from vllm_ascend_pd.doctor.peer.path import SMALL_MTU, Path, look_at
from vllm_ascend_pd.doctor.peer.plane import ROUNDS, DoctorPlane, Geometry, work_seconds
from vllm_ascend_pd.errors import PDError, PDUnreachableError
from vllm_ascend_pd.secret import SECRET_FLAG, Secret
from vllm_ascend_pd.wire import DoctorAsk, DoctorReply, Refused

ANSWER_TIMEOUT_S: Final = 5.0  # of a ping
SLOW_GB_S: Final = 0.1
HIGH_RTT_MS: Final = 5.0
START_THERE: Final = "start one there: vllm pd doctor --listen HOST:PORT"


class DeclinedError(PDUnreachableError):
    """The other doctor answers that it will not."""


@dataclass(frozen=True)
class Visit:
    """What to do."""

    host: str
    port: int
    secret: Secret
    facts: dict[str, Any]
    num_bytes: int
    timeout_s: float
    listen: tuple[str, int] | None = None  # where the peer dials back; None: the address of the way to it
    transport: str = "auto"


class Visitor:
    """One visit. `run` yields checks as they end."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._session = secrets.token_hex(8)
        self._client = ControlClient(join_tcp(visit.host, visit.port), visit.secret)
        self._listener: DoctorListener | None = None
        self._plane: DoctorPlane | None = None
        self._is_open = False

    def run(self) -> Iterator[Check]:
        """All checks towards the peer, in order."""
        told: list[Check] = []
        try:
            for check in self._steps():
                told.append(check)
                yield check
        finally:
            self._close(told)

    def _steps(self) -> Iterator[Check]:
        visit = self._visit
        path = look_at(visit.host, visit.port, visit.timeout_s, wait_greeting=True)
        yield _tell_reachable(visit, path)
        if path.problem or not path.is_control_plane:
            return
        checks = self._check_secret()
        yield from checks
        if checks[0].state is State.FAIL:
            return
        try:
            self._is_open = True  # or will be: the answer may be what does not come
            opened = self._ask(
                "open", self._open_message(), Opened, visit.timeout_s + work_seconds(self._visit.num_bytes)
            )
        except DeclinedError as error:
            self._is_open = False
            yield fail("peer.session", str(error), "wait for the other doctor, or use one release on both sides")
            return
        except PDUnreachableError as error:
            yield fail("peer.session", str(error), "look at the other doctor's output")
            return
        yield from host_facts.compare(self._visit.facts, opened.facts)
        yield from self._check_way_back(path)
        yield from self._transfer(path, opened)

    def _check_secret(self) -> list[Check]:
        key = "peer.secret"
        try:
            rtt_ms = ping(self._client, min(ANSWER_TIMEOUT_S, self._visit.timeout_s))
        except NoDoctorError:
            where = f"{self._visit.host}:{self._visit.port}"
            todo = "give --peer http://HOST:PORT of the instance's API server, or start a doctor there"
            return [fail(key, f"{where} is an engine core's control plane, not a doctor", todo)]
        except PDUnreachableError as error:
            todo = f"copy the file of {SECRET_FLAG} from one host to the other, or look at the firewall"
            return [fail(key, str(error), todo)]
        return [ok(key, "the same on both sides"), _tell_latency(rtt_ms)]

    def _open_message(self) -> Open:
        visit = self._visit
        return Open(
            protocol=PROTOCOL,
            session=self._session,
            num_bytes=visit.num_bytes,
            timeout_ms=round(1000 * visit.timeout_s),
            facts=visit.facts,
        )

    # ---------------------------------------------------------------- the way back

    def _check_way_back(self, path: Path) -> Iterator[Check]:
        key, visit = "peer.dial-back", self._visit
        listen = visit.listen or (path.own_address, 0)
        host = path.own_address if listen[0] in ("0.0.0.0", "::") else listen[0]
        listener = DoctorListener(visit.secret, listen, host, visit.facts)
        try:
            port = listener.start()
        except PDError as error:
            listener.close()
            yield fail(key, str(error).replace("--pd-listen", "--listen"), "give another --listen HOST:PORT")
            return
        self._listener = listener
        asked = DialBack(session=self._session, host=host, port=port)
        try:
            answer = self._ask("dial", asked, DialedBack, 2 * visit.timeout_s + ANSWER_TIMEOUT_S)
        except PDUnreachableError as error:
            answer = DialedBack(problem=str(error))
        if answer.problem:
            yield fail(
                key,
                f"the peer cannot connect to {host}:{port} here: {answer.problem}",
                "open the firewall from there to here (a prefill instance is dialled by decode instances), or give "
                "--listen an address that the peer can reach",
            )
        else:
            yield ok(key, f"the peer reaches {host}:{port} here, {answer.rtt_ms:.2f} ms there and back")
            yield _tell_mtu(path.mtu, answer.mtu)

    # ---------------------------------------------------------------- the transfer

    def _transfer(self, path: Path, opened: Opened) -> Iterator[Check]:
        keys = "transfer.from-peer", "transfer.to-peer"
        if opened.plane is None:
            for key in keys:
                yield fail(key, f"the peer has no data plane: {opened.reason}", "repair it there and run both again")
            return
        if ":" in path.own_address:
            for key in keys:
                yield not_applicable(key, "the data plane links over IPv4 only: give the peer's IPv4 address")
            return
        plane = self._plane = DoctorPlane(
            self._visit.secret,
            path.own_address,
            Geometry.of(self._visit.num_bytes),
            self._visit.timeout_s,
            self._visit.transport,
        )
        try:
            ours = plane.start()
        except PDError as error:
            yield fail(keys[0], str(error), "repair it here and run both again")
            return
        if is_loopback(opened.plane.host) and not is_loopback(path.peer_address):
            yield fail(
                keys[0],
                f"the peer announces {opened.plane.host} for its data plane, which is this host from here",
                "start the doctor (and vllm serve --pd-listen) there with its real address",
            )
        else:
            yield _tell_pull(keys[0], plane.pull(opened.plane), "from the peer")
        yield self._pull_back(keys[1], ours)

    def _pull_back(self, key: str, ours: PlaneAddress) -> Check:
        limit_s = (ROUNDS + 1) * (self._visit.timeout_s + work_seconds(self._visit.num_bytes)) + 3 * ANSWER_TIMEOUT_S
        try:
            pulled = self._ask("pull", PullBack(session=self._session, plane=ours), Pulled, limit_s)
        except PDUnreachableError as error:
            return fail(key, f"the peer did not pull: {error}", "look at the other doctor's output")
        return _tell_pull(key, pulled, "by the peer")

    # ---------------------------------------------------------------- plumbing

    def _ask(self, verb: str, message: msgspec.Struct, kind: type[Body], timeout_s: float) -> Body:
        """One question; asked again for as long as the peer is there, which it answers with the same work.

        Raises:
            PDUnreachableError: it has gone, or is not ready in time.
            DeclinedError: it will not.
        """
        deadline = time.monotonic() + timeout_s
        asked = DoctorAsk(verb=verb, body=write_body(message))
        while True:
            try:
                answer = self._client.request(asked, min(ANSWER_TIMEOUT_S, timeout_s), attempts=1)
                break
            except PDUnreachableError:
                if time.monotonic() >= deadline:
                    raise
                ping(self._client, ANSWER_TIMEOUT_S, count=1)
        if isinstance(answer, Refused):
            raise DeclinedError(answer.message)
        if not isinstance(answer, DoctorReply):
            raise NoDoctorError(f"{self._client.endpoint} is no doctor")
        return read_body(answer.body, kind)

    def _close(self, told: list[Check]) -> None:
        if self._is_open:
            failed = [check for check in told if check.state is State.FAIL]
            summary = "; ".join(f"{check.name}: {check.seen}" for check in failed) or "all well"
            closing = Close(session=self._session, ok=not failed, summary=summary[:1000])
            with suppress(PDError):  # it forgets us by itself
                self._ask("close", closing, Closed, ANSWER_TIMEOUT_S)
        if self._plane is not None:
            self._plane.close()
        if self._listener is not None:
            self._listener.close()
        self._client.close()


def _tell_reachable(visit: Visit, path: Path) -> Check:
    key, where = "peer.reachable", f"{visit.host}:{visit.port}"
    if path.problem:
        return fail(key, f"{where}: {path.problem}", f"{START_THERE}; check address and firewall")
    if not path.is_control_plane:
        return fail(
            key,
            f"{where} accepts connections and is no doctor",
            f"for a running instance give --peer http://{where}; else {START_THERE}",
        )
    return ok(key, f"{path.peer_address}:{visit.port} from {path.own_address} in {path.connect_ms:.2f} ms")


def _tell_latency(rtt_ms: float) -> Check:
    key, seen = "peer.latency", f"{rtt_ms:.2f} ms there and back"
    if rtt_ms > HIGH_RTT_MS:
        return warn(key, seen, "a handover takes several round trips: keep prefill and decode in one data centre")
    return ok(key, seen)


def _tell_mtu(mine: int, theirs: int) -> Check:
    key = "peer.mtu"
    if not mine or not theirs:
        return not_applicable(key, "the system does not tell")
    if mine != theirs:
        return warn(
            key,
            f"{mine} from here, {theirs} from there",
            "set the same MTU on both interfaces and all switches between: packets may vanish when they are large",
        )
    if mine < SMALL_MTU:
        return warn(key, f"{mine} both ways", "a tunnel on the way makes packets small; use the underlying network")
    return ok(key, f"{mine} both ways")


def _tell_pull(key: str, pulled: Pulled, who: str) -> Check:
    if pulled.problem:
        return fail(
            key,
            pulled.problem,
            "engines would fail alike: look at firewall (the data plane takes ports of its own), MTU and secret"
            if not pulled.seconds
            else "do not serve over this way: a host, a network card or this software damages data",
        )
    mib, speed = pulled.num_bytes / 2**20, pulled.num_bytes / max(pulled.seconds, 1e-9) / 1e9
    seen = (
        f"{mib:.0f} MiB pulled {who} over {pulled.transport} at {speed:.2f} GB/s, every byte as sent "
        f"(link made in {1000 * pulled.link_seconds:.0f} ms)"
    )
    if pulled.transport == "cann":
        seen += "; this path was not run on an NPU by its authors"
    if speed < SLOW_GB_S:
        return warn(key, seen, "slow for KV: 10,000 tokens of a large model take GB; use a faster network")
    return ok(key, seen)
