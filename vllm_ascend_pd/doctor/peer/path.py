# SPDX-License-Identifier: Apache-2.0
"""The way to a peer as TCP sees it: reachable, from which of our addresses, which MTU, and who answers first."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from vllm_ascend_pd.control.endpoint import resolve

IP_MTU = 14  # getsockopt of a connected socket: what the route (and path MTU discovery) allow
IPV6_MTU = 24
GREETING_WAIT_S = 0.5
SMALL_MTU = 1500


@dataclass(frozen=True)
class Path:
    """`problem` is empty when the connection was made. `speaks_first`: the first bytes came without being asked for."""

    problem: str = ""
    connect_ms: float = 0.0
    own_address: str = ""
    peer_address: str = ""
    mtu: int = 0
    greeting: bytes = b""

    @property
    def is_control_plane(self) -> bool:
        """Whether the other side greets as ZeroMQ does (a doctor, or an engine core's control plane)."""
        return self.greeting[:1] == b"\xff"


def look_at(host: str, port: int, timeout_s: float, *, wait_greeting: bool = False) -> Path:
    """Connect and close; sends nothing. With `wait_greeting`, half a second for the other side's first word."""
    started = time.monotonic()
    try:
        sock = socket.create_connection((resolve(host), port), timeout_s)
    except OSError as error:
        return Path(problem=explain(error, timeout_s))
    with sock:
        connect_ms = 1000 * (time.monotonic() - started)
        own, peer = sock.getsockname(), sock.getpeername()
        if own == peer:  # a free port of the ephemeral range can connect to itself
            return Path(problem="nobody listens there")
        is_v6 = sock.family == socket.AF_INET6
        try:
            mtu = sock.getsockopt(socket.IPPROTO_IPV6 if is_v6 else socket.IPPROTO_IP, IPV6_MTU if is_v6 else IP_MTU)
        except OSError:
            mtu = 0
        greeting = _read_greeting(sock) if wait_greeting else b""
    return Path("", connect_ms, str(own[0]), str(peer[0]), mtu, greeting)


def _read_greeting(sock: socket.socket) -> bytes:
    sock.settimeout(GREETING_WAIT_S)
    try:
        return sock.recv(64)
    except OSError:
        return b""


def explain(error: OSError, timeout_s: float) -> str:
    """Why a connection failed, with what it usually means."""
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s: a firewall drops it, or no such host"
    if isinstance(error, ConnectionRefusedError):
        return "refused: the host is there and nothing listens on that port"
    return str(error.strerror or error)
