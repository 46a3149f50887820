# SPDX-License-Identifier: Apache-2.0
"""Addresses of the control plane and the socket options that both of its ends share. Pure but for DNS; no thread."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any, Final

import zmq

from vllm_ascend_pd.secret import SECRET_FLAG, Secret
from vllm_ascend_pd.wire import MAX_FRAME_BYTES

REQUEST_ID_BYTES: Final = 8
HEARTBEAT_MS: Final = 2000
HEARTBEAT_TIMEOUT_MS: Final = 8000
HANDSHAKE_MS: Final = 10_000  # a connection that does not prove itself is closed after this
PROBE_TIMEOUT_S: Final = 0.5

_TCP: Final = "tcp://"
_IPC: Final = "ipc://"


def split_tcp(endpoint: str) -> tuple[str, str]:
    """Host (without brackets) and port of `tcp://host:port` or `tcp://[v6]:port`.

    Raises:
        ValueError: anything else.
    """
    host, colon, port = endpoint.removeprefix(_TCP).rpartition(":")
    if not endpoint.startswith(_TCP) or not colon or not host or not (port.isdecimal() or port == "*"):
        raise ValueError(f"{endpoint!r} is not of the form tcp://HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), port


def join_tcp(host: str, port: int | str) -> str:
    """`tcp://host:port`, with brackets around an IPv6 literal."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def ipc_path(endpoint: str) -> str:
    """The file of an `ipc://` endpoint; a plain path is taken as it is."""
    return endpoint.removeprefix(_IPC)


def is_tcp(endpoint: str) -> bool:
    """Whether the endpoint is on the peer plane."""
    return endpoint.startswith(_TCP)


def resolve(host: str) -> str:
    """A literal address for `host`; IPv4 first, so that binding and dialling `localhost` agree. May block on DNS.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # stable: the resolver's order within a family
    return str(found[0][4][0])


def set_common_options(sock: Any, linger_ms: int, tcp: bool) -> None:
    """Bounded frames; over TCP also heartbeats, so that a host that vanished is noticed while an answer is awaited."""
    sock.linger = linger_ms
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    if tcp:  # on a Unix socket the kernel tells, and a process that is only stopped keeps its connection
        sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def set_client_curve(sock: Any, secret: Secret) -> None:
    """Make `sock` talk only to a server that has the same secret."""
    public_key, secret_key = secret.curve_client_keys()
    sock.curve_publickey = public_key
    sock.curve_secretkey = secret_key
    sock.curve_serverkey = secret.curve_server_keys()[0]


def explain_silence(endpoint: str) -> str:
    """What to check when `endpoint` does not answer; tells a closed port from a silent one. Blocks <= 0.5 s."""
    if not is_tcp(endpoint):
        if not os.path.exists(ipc_path(endpoint)):
            return "there is no such socket; the engine core is not running (any more)"
        return "the engine core is stuck or has died"
    host, port = split_tcp(endpoint)
    try:
        with socket.create_connection((host, int(port)), PROBE_TIMEOUT_S):
            pass
    except OSError as error:
        return f"no connection ({error.strerror or error}); check that it runs, the address and the firewall"
    return (
        f"the port is open but nothing answers; the two sides may have unlike secrets (check {SECRET_FLAG} on both), "
        "or it is stuck"
    )
