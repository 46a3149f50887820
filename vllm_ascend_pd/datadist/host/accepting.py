# SPDX-License-Identifier: Apache-2.0
"""The listener's side of links: makes them, lets descriptors through, tears them down on request.

Runs in the connection threads of the two listeners. A link is pending between our ConnectReply and the
dialler's Ready; meanwhile its other connections find it by a random token. Then the C++ plane has the connections.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from vllm_ascend_pd.datadist.host.channel import receive_message, send_message
from vllm_ascend_pd.datadist.host.descriptors import receive_arenas, send_arenas
from vllm_ascend_pd.datadist.host.framing import BadFrame, ChannelError, PeerGone, close
from vllm_ascend_pd.datadist.host.identity import Identity
from vllm_ascend_pd.datadist.host.link import Link, PeerCaches, check_entries
from vllm_ascend_pd.datadist.host.messages import Connect, ConnectReply, Done, Hello, Ready, Unlink
from vllm_ascend_pd.datadist.host.table import Export
from vllm_ascend_pd.datadist.status import LLMStatusCode
from vllm_ascend_pd.memory.mapping import SharedMapping

logger = logging.getLogger(__name__)

_SETUP_S: Final = 10.0  # for the dialler to send what is due


@dataclass
class _Pending:
    """A link that is being made."""

    export: Export
    num_connections: int  # that are due in either direction, the first `data` one being there
    data: list[socket.socket] = field(default_factory=list)  # the dialler asks over these
    reverse: list[socket.socket] = field(default_factory=list)  # and answers over these
    changed: threading.Condition = field(default_factory=threading.Condition)  # guards all of them
    is_over: bool = False
    mappings: dict[int, SharedMapping] | None = None

    def add(self, purpose: str, sock: socket.socket) -> None:
        """One more connection of the dialler's. Raises BadFrame when it is one too many."""
        with self.changed:
            have, wanted = (
                (self.data, self.num_connections - 1) if purpose == "data" else (self.reverse, self.num_connections)
            )
            if self.is_over or len(have) >= wanted:
                raise BadFrame(f"a {purpose} connection too many")
            have.append(sock)
            self.changed.notify_all()

    def wait(self, deadline: float) -> None:
        """Until all are there; the dialler has seen their greetings complete before we did. Raises BadFrame."""
        with self.changed:
            while len(self.data) + len(self.reverse) < 2 * self.num_connections - 1:
                left = deadline - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    raise BadFrame(f"ready with {len(self.data) + len(self.reverse)} further connections")

    def take(self) -> tuple[list[socket.socket], list[socket.socket]]:
        """All connections, for the caller to close."""
        with self.changed:
            taken, self.data, self.reverse = (self.data, self.reverse), [], []
            return taken

    def end(self) -> None:
        """Close what nobody took."""
        with self.changed:
            self.is_over = True
            for sock in (*self.data, *self.reverse):
                close(sock)


class Acceptor:
    """Serves greeted connections."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._lock = threading.Lock()  # guards _pending
        self._pending: dict[bytes, _Pending] = {}
        self.descriptor_socket = ""  # set once that listener stands
        self.serve_join: Callable[[socket.socket], None] | None = None  # purpose `comm`: two-sided links

    def serve_tcp(self, sock: socket.socket, hello: Hello) -> bool:
        """One TCP connection; see Listener."""
        if hello.purpose == "link":
            self._serve_link(sock)
            return False
        if hello.purpose in ("data", "reverse"):
            self._find_pending(hello).add(hello.purpose, sock)
            return True
        if hello.purpose == "unlink":
            self._serve_unlink(sock)
            return False
        if hello.purpose == "comm" and self.serve_join is not None:
            self.serve_join(sock)
            return False
        raise BadFrame(f"purpose {hello.purpose!r} on TCP")

    def serve_unix(self, sock: socket.socket, hello: Hello) -> bool:
        """One connection of the Unix socket; see Listener."""
        if hello.purpose != "arenas":
            raise BadFrame(f"purpose {hello.purpose!r} on the descriptor socket")
        pending = self._find_pending(hello)
        deadline = time.monotonic() + _SETUP_S
        try:
            pending.mappings = receive_arenas(sock, deadline)
        except OSError as error:
            logger.warning("cannot map a peer's arenas, reading them over TCP: %s", error)
        send_arenas(sock, pending.export.arenas, deadline)
        return False

    def _find_pending(self, hello: Hello) -> _Pending:
        with self._lock:
            pending = self._pending.get(hello.link_token)
        if pending is None:
            raise BadFrame("no such link is being made")
        return pending

    def _serve_link(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + _SETUP_S
        connect = receive_message(sock, Connect, deadline)
        reason = self._refuse(connect)
        if reason is not None:
            status, text = reason
            logger.warning("cluster_id=%d: link refused: %s", connect.cluster_id, text)
            send_message(sock, ConnectReply(status=status, reason=text), deadline)
            return
        num_connections = min(self._identity.options.num_connections, connect.connections)
        token, pending = secrets.token_bytes(16), _Pending(self._identity.caches.export(), num_connections)
        with self._lock:
            self._pending[token] = pending
        try:
            self._complete(sock, connect, token, pending, deadline)
        finally:
            with self._lock:
                del self._pending[token]
            pending.end()

    def _refuse(self, connect: Connect) -> tuple[LLMStatusCode, str] | None:
        me = self._identity
        if not connect.remote_accessible:
            return LLMStatusCode.LLM_PARAM_INVALID, "enable_remote_cache_accessible: peer False, here True"
        if connect.connections < 1:
            return LLMStatusCode.LLM_PARAM_INVALID, f"connections: peer {connect.connections}, at least 1 is needed"
        if connect.instance == me.instance:
            return None
        if me.links.is_dialling(connect.cluster_id) and me.cluster_id < connect.cluster_id:
            return LLMStatusCode.LLM_ALREADY_LINK, "both sides link at once; the lower cluster id goes first"
        stale = me.links.get(connect.cluster_id)
        if stale is not None:
            if not connect.force:
                return LLMStatusCode.LLM_ALREADY_LINK, "the link exists on the listening side"
            if me.links.remove(stale):
                stale.close(me.timeout_s, "the peer linked anew")
        return None

    def _complete(
        self, sock: socket.socket, connect: Connect, token: bytes, pending: _Pending, deadline: float
    ) -> None:
        me = self._identity
        reply = ConnectReply(
            status=LLMStatusCode.LLM_SUCCESS,
            cluster_id=me.cluster_id,
            instance=me.instance,
            transport=me.options.transport,
            boot_id=me.boot_id,
            descriptor_socket=self.descriptor_socket,
            link_token=token,
            caches=pending.export.entries,
            connections=pending.num_connections,
        )
        send_message(sock, reply, deadline)
        receive_message(sock, Ready, deadline)
        pending.wait(deadline)
        check_entries(connect.caches, pending.mappings)
        data, reverse = pending.take()
        peer = PeerCaches(connect.cluster_id, connect.caches, pending.mappings)
        is_own = connect.instance == me.instance
        last_id = pending.export.last_cache_id
        # The link must be in the table before the dialler knows, and its first connection is the plane's by then.
        with sock.dup() as word:
            link = me.watcher.open(peer, reverse, [sock, *data], last_id, accepted=True, is_own=is_own)
            self._announce(link, word, deadline)

    def _announce(self, link: Link, word: socket.socket, deadline: float) -> None:
        links = self._identity.links
        if link.is_own:
            links.add_own(link)
        elif not links.add(link):
            send_message(word, Ready(status=LLMStatusCode.LLM_ALREADY_LINK, reason="linked meanwhile"), deadline)
            link.close(0.0, "linked meanwhile")
            return
        try:
            send_message(word, Ready(), deadline)
        except ChannelError:
            links.retire(link)
            link.close(0.0, "the peer broke off")
            raise
        logger.info("cluster_id=%d: linked, transport %s", link.cluster_id, link.transport)

    def _serve_unlink(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + _SETUP_S
        request = receive_message(sock, Unlink, deadline)
        link = self._identity.links.get(request.cluster_id)
        if link is not None and self._identity.links.remove(link):
            link.close(self._identity.timeout_s, "the peer asked for it")
        try:
            send_message(sock, Done(status=LLMStatusCode.LLM_SUCCESS), time.monotonic() + _SETUP_S)
        except PeerGone:
            pass  # it did not wait for the answer
