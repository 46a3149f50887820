# SPDX-License-Identifier: Apache-2.0
"""Bounded frames on stream sockets while a link is made, every wait with a deadline (`time.monotonic()` seconds).

A frame is magic (u32), length (u32), body; little-endian. Once the link stands, its sockets belong to the C++
plane, which has frames of its own. Sockets are in blocking mode with kernel timeouts; one thread uses a socket at
a time.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

MAGIC: Final = 0x31444450  # "PDD1"
MAX_FRAME_BYTES: Final = 4 << 20
MAX_GREETING_BYTES: Final = 4 << 10  # before the peer has proved that it knows the secret

_HEADER: Final = struct.Struct("<II")
_BATCH_VIEWS: Final = 512  # below IOV_MAX
_BATCH_BYTES: Final = 8 << 20  # between two looks at the deadline


class ChannelError(Exception):
    """The channel is of no use any more."""


class PeerGone(ChannelError):
    """The peer closed the connection, or its host did."""


class ChannelTimeout(ChannelError):
    """The deadline passed; where the stream stands is not known."""


class BadFrame(ChannelError):
    """What came is not of this protocol, or larger than allowed."""


def _arm(sock: socket.socket, option: int, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChannelTimeout("deadline passed")
    seconds = int(left)
    micros = max(1, int((left - seconds) * 1e6))
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, micros))
    except OSError as error:
        raise PeerGone(f"closed on this side: {error}") from error


def receive_into(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Fill all views in order. Raises PeerGone, ChannelTimeout."""
    pending = [view for view in views if len(view)]
    start = 0
    while start < len(pending):
        batch = _take_batch(pending, start)
        _arm(sock, socket.SO_RCVTIMEO, deadline)
        try:
            received = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise ChannelTimeout("deadline passed while receiving") from None
        except OSError as error:
            raise PeerGone(f"receive failed: {error}") from error
        if received == 0:
            raise PeerGone("connection closed by the peer")
        start = _advance(pending, start, received)


def send_from(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Send all views in order. Raises PeerGone, ChannelTimeout."""
    pending = [view for view in views if len(view)]
    start = 0
    while start < len(pending):
        batch = _take_batch(pending, start)
        _arm(sock, socket.SO_SNDTIMEO, deadline)
        try:
            sent = sock.sendmsg(batch)
        except BlockingIOError:
            raise ChannelTimeout("deadline passed while sending") from None
        except OSError as error:
            raise PeerGone(f"send failed: {error}") from error
        start = _advance(pending, start, sent)


def _take_batch(pending: list[memoryview], start: int) -> list[memoryview]:
    batch: list[memoryview] = []
    room = _BATCH_BYTES
    for view in pending[start : start + _BATCH_VIEWS]:
        batch.append(view[:room])
        room -= len(batch[-1])
        if room == 0:
            break
    return batch


def _advance(pending: list[memoryview], start: int, num_bytes: int) -> int:
    """Drop what has been moved from the front; a partly moved view is replaced by its rest."""
    while num_bytes > 0:
        size = len(pending[start])
        if num_bytes < size:
            pending[start] = pending[start][num_bytes:]
            return start
        num_bytes -= size
        start += 1
    return start


def send_frame(sock: socket.socket, body: bytes, deadline: float) -> None:
    """Send one frame. Raises PeerGone, ChannelTimeout."""
    header = _HEADER.pack(MAGIC, len(body))
    send_from(sock, [memoryview(header), memoryview(body)], deadline)


def receive_frame(sock: socket.socket, deadline: float, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Receive one frame's body. Raises PeerGone, ChannelTimeout, BadFrame."""
    header = bytearray(_HEADER.size)
    receive_into(sock, [memoryview(header)], deadline)
    magic, size = _HEADER.unpack(header)
    if magic != MAGIC:
        raise BadFrame(f"magic is {magic:#x}, not {MAGIC:#x}")
    if size > limit:
        raise BadFrame(f"frame of {size} bytes, at most {limit} are allowed")
    body = bytearray(size)
    receive_into(sock, [memoryview(body)], deadline)
    return bytes(body)


def configure(sock: socket.socket) -> None:
    """No delay, large buffers, and keepalive that notices a dead host within half a minute."""
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.settimeout(None)


def cut(sock: socket.socket) -> None:
    """End the connection and wake whoever waits on it; the descriptor stays with its user, who closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def close(sock: socket.socket) -> None:
    """End the connection and close it; nobody else may use the socket any more."""
    cut(sock)
    sock.close()
