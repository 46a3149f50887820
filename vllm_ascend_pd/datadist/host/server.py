# SPDX-License-Identifier: Apache-2.0
"""A listening socket whose connections must greet within seconds; one thread accepts, one serves each.

Whatever comes in costs at most a thread for the greeting's deadline; what is wrong is counted and closed.
Used for the TCP listener of `listen_ip_info` and for the Unix socket that passes descriptors.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.datadist.host.channel import NotAuthenticated, greet
from vllm_ascend_pd.datadist.host.framing import (
    BadFrame,
    ChannelError,
    ChannelTimeout,
    PeerGone,
    close,
    configure,
    cut,
)
from vllm_ascend_pd.datadist.host.messages import Hello

logger = logging.getLogger(__name__)

GREETING_S: Final = 5.0
_MAX_GREETING: Final = 64  # connections that have not greeted yet
_BACKLOG: Final = 128
_JOIN_S: Final = 5.0


@dataclass
class ServerCounters:
    """What became of incoming connections."""

    accepted: int = 0
    greeted: int = 0
    refused_busy: int = 0
    refused_user: int = 0
    bad_frames: int = 0
    not_authenticated: int = 0
    timeouts: int = 0
    ended_early: int = 0


def listen_tcp(address: tuple[str, int]) -> socket.socket:
    """A listening TCP socket. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def listen_unix(name: str) -> socket.socket:
    """A listening Unix socket in the abstract namespace: it is gone with the process. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class Listener:
    """Accepts, greets, and gives each greeted connection to `serve` in that connection's thread.

    `serve(sock, hello)` returns True when it has passed the socket on; else it is closed here.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, serve: Callable[[socket.socket, Hello], bool], name: str
    ) -> None:
        self.counters = ServerCounters()
        self._sock = sock
        self._secret = secret
        self._serve = serve
        self._lock = threading.Lock()  # guards counters, _greeting, _open, _threads, _closed
        self._greeting = 0
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._name = name
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        return int(self._sock.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                logger.exception("%s: accept failed", self._name)  # out of descriptors, most likely
                time.sleep(0.1)
                continue
            with self._lock:
                busy = self._closed or self._greeting >= _MAX_GREETING
                self.counters.accepted += 1
                self.counters.refused_busy += busy
                if not busy:
                    self._greeting += 1
                    self._open.add(sock)
                    thread = threading.Thread(target=self._run, args=(sock,), name=f"{self._name}-peer", daemon=True)
                    self._threads.add(thread)
            if busy:
                sock.close()
            else:
                thread.start()

    def _run(self, sock: socket.socket) -> None:
        passed_on = False
        try:
            configure(sock)
            hello = self._greet(sock)
            if hello is not None:
                passed_on = self._serve(sock, hello)
        except ChannelError as error:
            self._count(error)
        except Exception:
            logger.exception("%s: serving a connection failed", self._name)
        finally:
            with self._lock:
                self._open.discard(sock)
                self._threads.discard(threading.current_thread())
            if not passed_on:
                close(sock)

    def _greet(self, sock: socket.socket) -> Hello | None:
        try:
            if not self._secret and sock.family == socket.AF_UNIX and not _is_same_user(sock):
                with self._lock:
                    self.counters.refused_user += 1
                return None
            hello = greet(sock, self._secret, time.monotonic() + GREETING_S)
            with self._lock:
                self.counters.greeted += 1
            return hello
        finally:
            with self._lock:
                self._greeting -= 1

    def _count(self, error: ChannelError) -> None:
        with self._lock:
            if isinstance(error, NotAuthenticated):
                self.counters.not_authenticated += 1
            elif isinstance(error, BadFrame):
                self.counters.bad_frames += 1
            elif isinstance(error, ChannelTimeout):
                self.counters.timeouts += 1
            elif isinstance(error, PeerGone):
                self.counters.ended_early += 1
        logger.warning("%s: connection dropped: %s", self._name, error)

    def close(self) -> None:
        """Stop accepting, cut what is open, and wait for the threads."""
        with self._lock:
            self._closed = True
            waiting = list(self._threads)
            for sock in self._open:
                cut(sock)
        close(self._sock)
        for thread in (self._acceptor, *waiting):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(_JOIN_S)


def _is_same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
