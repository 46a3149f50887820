# SPDX-License-Identifier: Apache-2.0
"""The listener's side of links: makes them, lets descriptors through, tears them down on request.

Runs in the connection threads of the two listeners. A link is pending between our ConnectReply and the
dialler's Ready; meanwhile its `reverse` and `arenas` connections find it by a random token.
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
from vllm_ascend_pd.datadist.host.link import Link, check_entries
from vllm_ascend_pd.datadist.host.messages import Connect, ConnectReply, Done, Hello, Ready, Unlink
from vllm_ascend_pd.datadist.host.serving import serve_link
from vllm_ascend_pd.datadist.host.table import Export
from vllm_ascend_pd.datadist.status import LLMStatusCode
from vllm_ascend_pd.memory.mapping import SharedMapping

logger = logging.getLogger(__name__)

_SETUP_S: Final = 10.0  # for the dialler to send what is due


@dataclass
class _Pending:
    """A link that is being made."""

    export: Export
    reverse: socket.socket | None = None
    reversed: threading.Event = field(default_factory=threading.Event)
    mappings: dict[int, SharedMapping] | None = None


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
        if hello.purpose == "reverse":
            pending = self._find_pending(hello)
            if pending.reversed.is_set():
                raise BadFrame("a second reverse connection")
            pending.reverse = sock
            pending.reversed.set()
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
        token, pending = secrets.token_bytes(16), _Pending(self._identity.caches.export())
        with self._lock:
            self._pending[token] = pending
        try:
            link = self._complete(sock, connect, token, pending, deadline)
        finally:
            with self._lock:
                del self._pending[token]
        if link is not None:
            self._serve(link, deadline, is_own=connect.instance == self._identity.instance)

    def _refuse(self, connect: Connect) -> tuple[LLMStatusCode, str] | None:
        me = self._identity
        if not connect.remote_accessible:
            return LLMStatusCode.LLM_PARAM_INVALID, "enable_remote_cache_accessible: peer False, here True"
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
    ) -> Link | None:
        me = self._identity
        export = pending.export
        reply = ConnectReply(
            status=LLMStatusCode.LLM_SUCCESS,
            cluster_id=me.cluster_id,
            instance=me.instance,
            transport=me.options.transport,
            boot_id=me.boot_id,
            descriptor_socket=self.descriptor_socket,
            link_token=token,
            caches=export.entries,
        )
        send_message(sock, reply, deadline)
        try:
            receive_message(sock, Ready, deadline)
            # Its greeting was complete for the dialler before it was for us.
            pending.reversed.wait(max(0.0, deadline - time.monotonic()))
            reverse = pending.reverse
            if reverse is None:
                raise BadFrame("ready without the reverse connection")
            check_entries(connect.caches, pending.mappings)
            link = Link(connect.cluster_id, reverse, sock, connect.caches, pending.mappings, export.last_cache_id)
            if connect.instance == me.instance:
                me.links.add_own(link)
            elif not me.links.add(link):
                answer = Ready(status=LLMStatusCode.LLM_ALREADY_LINK, reason="linked meanwhile")
                send_message(sock, answer, deadline)
                close(reverse)
                return None
        except ChannelError:
            if pending.reverse is not None:
                close(pending.reverse)
            raise
        return link

    def _serve(self, link: Link, deadline: float, *, is_own: bool) -> None:
        links = self._identity.links
        try:
            send_message(link.serve_sock, Ready(), deadline)
            logger.info("cluster_id=%d: linked, transport %s", link.cluster_id, link.transport)
            farewell = serve_link(link, self._identity.caches, self._identity.timeout_s)
        except ChannelError:
            links.retire(link)
            link.close(0.0, "the peer broke the protocol or off")
            raise
        if farewell or is_own:
            links.remove(link)
            link.close(self._identity.timeout_s, "the peer has torn the link down")
        else:
            links.retire(link)

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
