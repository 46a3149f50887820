# SPDX-License-Identifier: Apache-2.0
"""Passing arenas to a peer on the same machine and mapping what the peer passes, over a Unix connection.

Descriptors are reopened read-only before they leave. What comes in is mapped only if its size is as announced
and sealed against shrinking, so that a read can never fault.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Final

from vllm_ascend_pd.datadist.host.channel import receive_message, send_message
from vllm_ascend_pd.datadist.host.framing import BadFrame, ChannelTimeout, PeerGone
from vllm_ascend_pd.datadist.host.messages import Arenas
from vllm_ascend_pd.memory.arena import Arena
from vllm_ascend_pd.memory.mapping import SharedMapping, round_up

MAX_ARENAS: Final = 64
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 0x2


def read_boot_id() -> str:
    """Names this boot of this machine; empty where unknown, which is then no machine's id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def send_arenas(sock: socket.socket, arenas: dict[int, Arena], deadline: float) -> None:
    """Announce and pass read-only descriptors of at most MAX_ARENAS arenas. Raises ChannelError."""
    ids = sorted(arenas)[:MAX_ARENAS]
    message = Arenas(arena_ids=ids, num_bytes=[arenas[number].num_bytes for number in ids])
    send_message(sock, message, deadline)
    if not ids:
        return
    flags = os.O_RDONLY | os.O_CLOEXEC
    opened: list[int] = []
    try:
        opened += [os.open(f"/proc/self/fd/{arenas[number].fd}", flags) for number in ids]
        socket.send_fds(sock, [b"d"], opened)
    except OSError as error:
        raise PeerGone(f"cannot pass descriptors: {error}") from error
    finally:
        for fd in opened:
            os.close(fd)


def receive_arenas(sock: socket.socket, deadline: float) -> dict[int, SharedMapping]:
    """Map what the peer passes. Raises ChannelError, OSError when it cannot be mapped."""
    message = receive_message(sock, Arenas, deadline)
    count = len(message.arena_ids)
    if count != len(message.num_bytes) or count > MAX_ARENAS or min(message.num_bytes, default=1) <= 0:
        raise BadFrame(f"{count} arenas with {len(message.num_bytes)} sizes")
    if count == 0:
        return {}
    fds = _receive_fds(sock, count, deadline)
    try:
        if len(fds) != count:
            raise BadFrame(f"{len(fds)} descriptors for {count} arenas")
        mappings: dict[int, SharedMapping] = {}
        for number, num_bytes, fd in zip(message.arena_ids, message.num_bytes, fds, strict=True):
            sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size < round_up(num_bytes):
                raise BadFrame(f"arena {number} is not a sealed file of {num_bytes} bytes")
            mappings[number] = SharedMapping(fd, num_bytes, writable=False)
        return mappings
    finally:
        for fd in fds:
            os.close(fd)


def _receive_fds(sock: socket.socket, count: int, deadline: float) -> list[int]:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    item = array.array("i")
    try:
        data, ancillary, flags, _ = sock.recvmsg(1, socket.CMSG_SPACE(count * item.itemsize), socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise ChannelTimeout("no descriptors came") from None
    except OSError as error:
        raise PeerGone(f"receive failed: {error}") from error
    finally:
        sock.settimeout(None)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            item.frombytes(payload[: len(payload) - len(payload) % item.itemsize])
    fds = item.tolist()
    if not data or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise PeerGone(f"the peer passed {'too many' if data else 'no'} descriptors")
    return fds
