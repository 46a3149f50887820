# SPDX-License-Identifier: Apache-2.0
"""Ports of the data plane on hosts with NPUs: tried one after the other, away from those that CANN's transports take.

CANN's engines take random ports from 20000 up (1000 for each NPU of a host), and so may the operating system: its
range of ephemeral ports begins at 32768. Binding port 0 is no way out, therefore. Pure but for the trial bind.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from vllm_ascend_pd.errors import PDConfigError, PDPortTakenError

Bound = TypeVar("Bound")

TAKEN_BY_CANN: Final = range(20000, 36000)  # Source: ascend.md §2.4
DEFAULT_PORTS: Final = range(18000, 20000)
PORTS_PER_INSTANCE: Final = 200  # after --pd-listen's, where that is given
STEP: Final = 8  # ranks begin their search so far apart: they all start at the same moment


def allowed_ports(listen_port: int) -> range:
    """Where an instance looks for free ports: after `--pd-listen`'s port, or the default range when that is 0.

    Raises:
        PDConfigError: the range would meet CANN's, or is empty.
    """
    if not listen_port:
        return DEFAULT_PORTS
    found = range(listen_port, min(listen_port + 1 + PORTS_PER_INSTANCE, 1 << 16))
    if found.start < TAKEN_BY_CANN.stop and TAKEN_BY_CANN.start < found.stop:
        raise PDConfigError(
            f"--pd-listen: port {listen_port}: on hosts with NPUs the data plane takes ports {found.start + 1} to "
            f"{found.stop - 1}, and CANN's transports those from {TAKEN_BY_CANN.start} to {TAKEN_BY_CANN.stop - 1}; "
            f"use a port below {TAKEN_BY_CANN.start - PORTS_PER_INSTANCE - 1} or from {TAKEN_BY_CANN.stop} on"
        )
    if len(found) < 2:
        raise PDConfigError(
            f"--pd-listen: port {listen_port}: on hosts with NPUs the data plane takes the ports after it, and there "
            f"are none; use a port of at most {(1 << 16) - 1 - PORTS_PER_INSTANCE}"
        )
    return found[1:]


def candidates(listen_port: int, offset: int = 0) -> Iterator[int]:
    """All allowed ports once, beginning `offset` steps into the range. Raises as `allowed_ports`."""
    ports = allowed_ports(listen_port)
    first = offset * STEP % len(ports)
    yield from ports[first:]
    yield from ports[:first]


def is_free(host: str, port: int) -> bool:
    """Whether the port can be bound now. Raises OSError when the address is the trouble and not the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def bind_first(bind: Callable[[int], Bound], host: str, listen_port: int = 0, offset: int = 0) -> Bound:
    """What `bind(port)` returns for the first allowed port that nobody has; bound at once, so that nobody can take it.

    Raises:
        PDConfigError: all are taken; or what `bind` raises, but for PDPortTakenError.
    """
    for port in candidates(listen_port, offset):
        try:
            return bind(port)
        except PDPortTakenError:
            continue
    ports = allowed_ports(listen_port)
    raise PDConfigError(
        f"--pd-listen: no free port on {host} from {ports.start} to {ports.stop - 1}; name another port to begin at"
    )
