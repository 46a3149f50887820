# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of hosts for one rank table, without ssh: every host runs `generate`, one of them collects.

The collector listens with CURVE keys derived from the deployment's secret; a sender repeats its offer until it has the
finished table. Offers are known by their sender's random name, so repeats change nothing. Frames are bounded by
`control.endpoint`, the whole by one deadline. One thread on each side: the caller's.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_ascend_pd.control.endpoint import (
    explain_silence,
    join_tcp,
    resolve,
    set_client_curve,
    set_common_options,
    split_tcp,
)
from vllm_ascend_pd.control.zap import ZapGate
from vllm_ascend_pd.errors import PDAuthError, PDConfigError, PDUnreachableError
from vllm_ascend_pd.secret import SECRET_FLAG, Secret
from vllm_ascend_pd.wire import MAX_FRAME_BYTES, DeviceAddress

PROTOCOL: Final = 1
MAX_HOSTS: Final = 1024
MAX_DEVICES: Final = 64  # of one host
MAX_TEXT: Final = 256
REPEAT_S: Final = 0.5
GRACE_S: Final = 10.0  # for the last senders to fetch the table
_LINGER_MS: Final = 500
_CONFIRM_MS: Final = 2000
_REFUSALS: Final = 3  # handshakes that must fail before the secret is blamed
_MONITORED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
)

Say = Callable[[str], None]


class Offer(msgspec.Struct, tag="offer", frozen=True, kw_only=True):
    """One host's devices, by role; `others` have none."""

    protocol: int
    sender: str
    host_name: str
    prefill: tuple[DeviceAddress, ...] = ()
    decode: tuple[DeviceAddress, ...] = ()
    others: tuple[DeviceAddress, ...] = ()

    @property
    def devices(self) -> tuple[DeviceAddress, ...]:
        """All of them."""
        return (*self.prefill, *self.decode, *self.others)

    @property
    def server_id(self) -> str:
        """Of the host; all its devices have the same."""
        return self.devices[0].server_id if self.devices else ""

    def describe(self) -> str:
        """For progress lines."""
        roles = (("prefill", self.prefill), ("decode", self.decode), ("without a role", self.others))
        counts = ", ".join(f"{len(devices)} {name}" for name, devices in roles if devices)
        return f"{self.host_name} ({self.server_id}): {counts}"


class Waiting(msgspec.Struct, tag="waiting", frozen=True, kw_only=True):
    """The offer is taken; others are missing."""

    have: int
    want: int


class Finished(msgspec.Struct, tag="finished", frozen=True, kw_only=True):
    """The file's content."""

    table: str


class Declined(msgspec.Struct, tag="declined", frozen=True, kw_only=True):
    """The offer does not fit; `message` says why and what to do."""

    message: str


class Received(msgspec.Struct, tag="received", frozen=True, kw_only=True):
    """The sender has its last answer. Until then the collector stays: what it has sent is lost if it goes too early."""

    sender: str


Reply = Waiting | Finished | Declined


def make_offer(
    prefill: Sequence[DeviceAddress], decode: Sequence[DeviceAddress], others: Sequence[DeviceAddress]
) -> Offer:
    """This host's offer under a new name."""
    return Offer(
        protocol=PROTOCOL,
        sender=secrets.token_hex(8),
        host_name=socket.gethostname()[:MAX_TEXT],
        prefill=tuple(prefill),
        decode=tuple(decode),
        others=tuple(others),
    )


class Collector:
    """Listens from the start; `collect` waits for the others. One thread."""

    def __init__(self, host: str, port: int, secret: Secret, own: Offer, num_hosts: int, say: Say) -> None:
        self._own = own
        self._want = num_hosts
        self._say = say
        self._offers: dict[str, Offer] = {own.sender: own}
        self._declined: set[str] = set()
        self._decoder: msgspec.msgpack.Decoder[Offer | Received] = msgspec.msgpack.Decoder(Offer | Received)
        self._counters: Counter[str] = Counter()
        self._context = zmq.Context()
        try:
            self._gate = ZapGate(self._context, {secret.curve_client_keys()[0]}, self._counters)
            self._sock = self._listen(host, port, secret)
        except BaseException:
            self._context.destroy(0)
            raise
        self.port = int(split_tcp(self._sock.getsockopt_string(zmq.LAST_ENDPOINT))[1])

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(_LINGER_MS)

    def collect(self, timeout_s: float) -> list[Offer]:
        """All hosts' offers: this host's first, the others by server id.

        Raises:
            PDUnreachableError: not all hosts came in time; names those that did.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._offers) < self._want:
            left = deadline - time.monotonic()
            if left <= 0:
                came = "; ".join(offer.describe() for offer in self._offers.values())
                denied = self._counters["denied"]
                stranger = f"; {denied} connections had another secret (check {SECRET_FLAG})" if denied else ""
                raise PDUnreachableError(
                    f"after {timeout_s:g} s {len(self._offers)} of {self._want} hosts are here: {came}{stranger}; "
                    "start `generate --send-to` on the others, or correct --hosts"
                )
            self._serve(min(left, REPEAT_S), None)
        others = sorted((offer for offer in self._offers.values() if offer is not self._own), key=lambda o: o.server_id)
        return [self._own, *others]

    def hand_out(self, table: str) -> None:
        """Give the finished table to all senders, for at most `GRACE_S`."""
        if len(table) > MAX_FRAME_BYTES // 2:
            self.decline(f"the table has {len(table)} characters, too many to send; copy the collector's file")
            return
        missing = self._answer_all(Finished(table=table))
        for sender in missing:
            self._say(f"{self._offers[sender].describe()}: has not confirmed the table; copy the file there")

    def decline(self, message: str) -> None:
        """Tell all senders that there will be no table."""
        self._answer_all(Declined(message=message))

    def _answer_all(self, final: Reply) -> set[str]:
        """The senders that have not confirmed it."""
        missing = {sender for sender in self._offers if sender != self._own.sender}
        deadline = time.monotonic() + GRACE_S
        while missing and (left := deadline - time.monotonic()) > 0:
            missing -= self._serve(min(left, REPEAT_S), final)
        return missing

    def _listen(self, host: str, port: int, secret: Secret) -> Any:
        literal = "*" if host in ("*", "0.0.0.0") else _resolve(host, "--collect")
        sock = self._context.socket(zmq.ROUTER)
        set_common_options(sock, _LINGER_MS, tcp=True)
        sock.setsockopt(zmq.IPV6, int(":" in literal))
        public_key, secret_key = secret.curve_server_keys()
        sock.curve_server = True
        sock.curve_publickey = public_key
        sock.curve_secretkey = secret_key
        sock.zap_domain = b"vllm-pd"
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            sock.bind(join_tcp(literal, port or "*"))
        except zmq.ZMQError as error:
            raise PDConfigError(f"--collect {host}:{port}: cannot listen there: {error.strerror}") from error
        return sock

    def _serve(self, wait_s: float, final: Reply | None) -> set[str]:
        """Answer what comes within `wait_s`; the senders that have confirmed their last answer."""
        poller = zmq.Poller()
        poller.register(self._gate.sock, zmq.POLLIN)
        poller.register(self._sock, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * wait_s)))
        served: set[str] = set()
        if self._gate.sock in ready:
            self._gate.answer()
        while self._sock in ready:
            try:
                frames = self._sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 2:
                continue
            try:
                message = self._decoder.decode(frames[1])
            except Exception as error:  # msgspec's own errors, and RecursionError
                text = f"this is no offer that is known here: {str(error)[:200]}; use one version on all"
                reply: Reply = Declined(message=text)
            else:
                if isinstance(message, Received):
                    served.add(message.sender)
                    continue
                reply = self._judge(message, final)
            with contextlib.suppress(zmq.ZMQError):  # a sender that has gone; it comes again
                self._sock.send_multipart([frames[0], msgspec.msgpack.encode(reply)], zmq.NOBLOCK)
        return served

    def _judge(self, offer: Offer, final: Reply | None) -> Reply:
        if offer.sender in self._offers:
            return final or Waiting(have=len(self._offers), want=self._want)
        problem = self._find_problem(offer)
        if problem:
            if offer.sender not in self._declined and len(self._declined) < MAX_HOSTS:
                self._declined.add(offer.sender)
                self._say(f"declined {offer.host_name}: {problem}")
            return Declined(message=problem)
        self._offers[offer.sender] = offer
        self._say(f"{len(self._offers)}/{self._want} {offer.describe()}")
        return Waiting(have=len(self._offers), want=self._want)

    def _find_problem(self, offer: Offer) -> str:
        """Why this offer cannot be taken; empty when it can."""
        if offer.protocol != PROTOCOL:
            return f"it speaks protocol {offer.protocol}, the collector {PROTOCOL}; use one version on all hosts"
        if not 0 < len(offer.devices) <= MAX_DEVICES:
            return f"it offers {len(offer.devices)} devices; 1 to {MAX_DEVICES} are taken"
        texts = [offer.sender, offer.host_name]
        for device in offer.devices:
            texts += [device.server_id, device.device_ip, device.super_device_id, device.super_pod_id]
        if any(len(text) > MAX_TEXT for text in texts):
            return f"a text has more than {MAX_TEXT} characters"
        if len({device.server_id for device in offer.devices}) != 1 or not offer.server_id:
            return "its devices do not have one server id; use one version on all hosts"
        for other in self._offers.values():
            if other.server_id == offer.server_id:
                return (
                    f"{other.host_name} has the server id {offer.server_id} too; give each host its own: --server-id, "
                    "or VLLM_HOST_IP"
                )
        if len(self._offers) >= self._want:
            return f"{self._want} hosts are complete without it; correct --hosts on the collector"
        return ""


def send_offer(host: str, port: int, secret: Secret, offer: Offer, timeout_s: float, say: Say) -> str:
    """Send until the table comes back.

    Raises:
        PDAuthError: the collector has another secret.
        PDConfigError: the collector declined the offer.
        PDUnreachableError: no table in time.
    """
    endpoint = join_tcp(_resolve(host, "--send-to"), port)
    context = zmq.Context()
    try:
        sock = context.socket(zmq.DEALER)
        set_common_options(sock, 0, tcp=True)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        sock.setsockopt(zmq.IMMEDIATE, 1)  # offers must not pile up while nobody listens
        set_client_curve(sock, secret)
        monitor = sock.get_monitor_socket(_MONITORED)
        sock.connect(endpoint)
        table = _Sender(sock, monitor, offer, say).run(f"{host}:{port}", endpoint, timeout_s)
        sock.close(_CONFIRM_MS)
        return table
    finally:
        context.destroy(0)


class _Sender:
    def __init__(self, sock: Any, monitor: Any, offer: Offer, say: Say) -> None:
        self._sock = sock
        self._monitor = monitor
        self._payload = msgspec.msgpack.encode(offer)
        self._received = msgspec.msgpack.encode(Received(sender=offer.sender))
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._say = say
        self._refusals = 0
        self._accepted = False

    def run(self, name: str, endpoint: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        shown = (-1, -1)
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(zmq.Again):  # not connected yet
                self._sock.send(self._payload, zmq.NOBLOCK)
            reply = self._receive(min(left, REPEAT_S), name)
            if isinstance(reply, (Finished, Declined)):
                with contextlib.suppress(zmq.Again):
                    self._sock.send(self._received, zmq.NOBLOCK)
            if isinstance(reply, Finished):
                return reply.table
            if isinstance(reply, Declined):
                self._sock.close(_CONFIRM_MS)
                raise PDConfigError(f"{name} declines this host: {reply.message}")
            if isinstance(reply, Waiting) and (reply.have, reply.want) != shown:
                shown = (reply.have, reply.want)
                self._say(f"{name} has {reply.have} of {reply.want} hosts")
        reason = f"{shown[0]} of {shown[1]} hosts are there" if shown[0] >= 0 else explain_silence(endpoint)
        raise PDUnreachableError(f"{name} gave no table within {timeout_s:g} s: {reason}")

    def _receive(self, wait_s: float, name: str) -> Reply | None:
        """The newest answer within `wait_s`, which passes unless the table comes."""
        until = time.monotonic() + wait_s
        reply: Reply | None = None
        poller = zmq.Poller()
        poller.register(self._sock, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(1000 * left))))
            if self._monitor in ready:
                self._watch_handshake(name)
            if self._sock in ready:
                try:
                    reply = self._decoder.decode(self._sock.recv())
                except msgspec.MsgspecError as error:
                    raise PDUnreachableError(f"{name} answers in another protocol: {str(error)[:200]}") from error
                if not isinstance(reply, Waiting):
                    return reply
        return reply

    def _watch_handshake(self, name: str) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._accepted, self._refusals = True, 0
        else:
            self._refusals += 1
        if self._refusals >= _REFUSALS and not self._accepted:
            raise PDAuthError(
                f"{name} refuses this host's key: give the same {SECRET_FLAG} on all hosts (and check that it is the "
                "port of --collect)"
            )


def _resolve(host: str, flag: str) -> str:
    try:
        return resolve(host)
    except OSError as error:
        raise PDConfigError(f"{flag}: host {host!r} does not resolve: {error.strerror}") from error
