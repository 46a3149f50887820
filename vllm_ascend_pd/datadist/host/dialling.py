# SPDX-License-Identifier: Apache-2.0
"""The caller's side of `link_clusters` and `unlink_clusters`: status codes, never exceptions (§1.2).

Runs in the caller's thread or a short-lived pool of the engine. Each dial is bounded by the caller's timeout.
"""

from __future__ import annotations

import errno
import logging
import socket
import time

from vllm_ascend_pd.datadist.host.channel import NotAuthenticated, dial, receive_message, send_message
from vllm_ascend_pd.datadist.host.descriptors import receive_arenas, send_arenas
from vllm_ascend_pd.datadist.host.framing import BadFrame, ChannelError, ChannelTimeout, PeerGone, close, configure
from vllm_ascend_pd.datadist.host.identity import SOCKET_PREFIX, Identity
from vllm_ascend_pd.datadist.host.link import PeerCaches, check_entries
from vllm_ascend_pd.datadist.host.messages import Connect, ConnectReply, Done, Ready, Unlink
from vllm_ascend_pd.datadist.status import LLMStatusCode, to_status
from vllm_ascend_pd.memory.arena import Arena
from vllm_ascend_pd.memory.mapping import SharedMapping

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class _Refused(Exception):
    """The link cannot be; `status` says why."""

    def __init__(self, status: LLMStatusCode, text: str) -> None:
        super().__init__(text)
        self.status = status


class Dialler:
    """Makes and ends links to listening peers."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def link(self, cluster_id: int, address: Address, timeout_ms: int) -> LLMStatusCode:
        """One link; LLM_ALREADY_LINK also for a spoiled one, which must be unlinked first."""
        links = self._identity.links
        with links.dialling(cluster_id):
            if links.get(cluster_id) is not None:
                return LLMStatusCode.LLM_ALREADY_LINK
            return self._guard("link", cluster_id, address, timeout_ms, LLMStatusCode.LLM_LINK_FAILED)

    def unlink(self, cluster_id: int, address: Address | None, timeout_ms: int) -> LLMStatusCode:
        """End a link here, and first on the peer's side when its address is given (not forced)."""
        links = self._identity.links
        if links.get(cluster_id) is None:
            logger.warning("cluster_id=%d: unlink of a peer that is not linked", cluster_id)
            return LLMStatusCode.LLM_SUCCESS
        status = LLMStatusCode.LLM_SUCCESS
        if address is not None:
            status = self._guard("unlink", cluster_id, address, timeout_ms, LLMStatusCode.LLM_UNLINK_FAILED)
            if status in (LLMStatusCode.LLM_UNLINK_FAILED, LLMStatusCode.LLM_TIMEOUT):
                return status
        link = links.get(cluster_id)
        if link is not None and links.remove(link):
            link.close(self._identity.timeout_s, "unlinked")
        return status

    def _guard(
        self, verb: str, cluster_id: int, address: Address, timeout_ms: int, refused: LLMStatusCode
    ) -> LLMStatusCode:
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            if verb == "link":
                self._link(address, deadline)
            else:
                return self._unlink(address, deadline)
            return LLMStatusCode.LLM_SUCCESS
        except _Refused as error:
            status: LLMStatusCode = error.status
            text = str(error)
        except (ChannelTimeout, TimeoutError) as error:
            status, text = LLMStatusCode.LLM_TIMEOUT, f"no answer within {timeout_ms} ms: {error}"
        except NotAuthenticated as error:
            status, text = refused, f"{error}; is the secret the same on both sides?"
        except ChannelError as error:
            status, text = LLMStatusCode.LLM_FAILED, str(error)
        except OSError as error:
            status, text = refused, str(error)
            if error.errno == errno.ETIMEDOUT:
                status = LLMStatusCode.LLM_TIMEOUT
        logger.warning("cluster_id=%d: %s to %s:%d: %s (%s)", cluster_id, verb, *address, text, status)
        return status

    def connect(self, address: Address, deadline: float, purpose: str) -> socket.socket:
        """An authenticated connection for two-sided links. Raises ChannelError, OSError."""
        return self._connect(address, deadline, purpose)

    def _connect(self, address: Address, deadline: float, purpose: str, token: bytes = b"") -> socket.socket:
        sock = socket.create_connection(address, max(0.001, deadline - time.monotonic()))
        if sock.getsockname() == sock.getpeername():  # a free port of the ephemeral range can connect to itself
            sock.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        return self._greet(sock, deadline, purpose, token)

    def _greet(self, sock: socket.socket, deadline: float, purpose: str, token: bytes) -> socket.socket:
        try:
            configure(sock)
            dial(sock, self._identity.options.secret, purpose, token, deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    def _link(self, address: Address, deadline: float) -> None:
        me = self._identity
        export = me.caches.export()
        opened = [self._connect(address, deadline, "link")]
        try:
            forward = opened[0]
            connect = Connect(
                cluster_id=me.cluster_id,
                instance=me.instance,
                force=True,  # we hold no link to it: what it may still hold is stale
                remote_accessible=True,
                transport=me.options.transport,
                boot_id=me.boot_id,
                caches=export.entries,
                connections=me.options.num_connections,
            )
            send_message(forward, connect, deadline)
            reply = receive_message(forward, ConnectReply, deadline)
            if reply.status != LLMStatusCode.LLM_SUCCESS:
                raise _Refused(to_status(reply.status), f"refused: {reply.reason}")
            mappings = self._map(reply, export.arenas, deadline)
            check_entries(reply.caches, mappings)
            peer = PeerCaches(reply.cluster_id, reply.caches, mappings)
            if me.options.transport == "mapped" and peer.transport != "mapped":
                raise _Refused(LLMStatusCode.LLM_LINK_FAILED, "the peer's caches cannot be mapped, and must be")
            count = reply.connections
            if not 1 <= count <= me.options.num_connections:
                raise BadFrame(f"{count} connections, at most {me.options.num_connections} were offered")
            for purpose in ["data"] * (count - 1) + ["reverse"] * count:
                opened.append(self._connect(address, deadline, purpose, reply.link_token))
            send_message(forward, Ready(), deadline)
            answer = receive_message(forward, Ready, deadline)
            if answer.status != LLMStatusCode.LLM_SUCCESS:
                raise _Refused(to_status(answer.status), f"refused: {answer.reason}")
            link = me.watcher.open(peer, opened[:count], opened[count:], export.last_cache_id, accepted=False)
        except BaseException:
            for sock in opened:
                close(sock)
            raise
        if not me.links.add(link):
            link.close(0.0, "linked meanwhile")
            raise _Refused(LLMStatusCode.LLM_ALREADY_LINK, f"cluster {link.cluster_id} is linked already")
        logger.info("cluster_id=%d: linked, transport %s", link.cluster_id, link.transport)

    def _map(self, reply: ConnectReply, arenas: dict[int, Arena], deadline: float) -> dict[int, SharedMapping] | None:
        """Exchange arenas over the peer's Unix socket; None: over TCP then (or an error, when mapping is a must)."""
        me = self._identity
        try:
            if not me.may_map(reply.transport, reply.boot_id):
                raise PeerGone(f"transports are {me.options.transport} and {reply.transport}, or two machines")
            if not reply.descriptor_socket.startswith(SOCKET_PREFIX):
                raise PeerGone("the peer offers no descriptor socket")
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                raw.settimeout(max(0.001, deadline - time.monotonic()))
                raw.connect(f"\0{reply.descriptor_socket}")
                sock = self._greet(raw, deadline, "arenas", reply.link_token)
                send_arenas(sock, arenas, deadline)
                return receive_arenas(sock, deadline)
            finally:
                raw.close()
        except (ChannelError, OSError) as error:
            if "mapped" in (me.options.transport, reply.transport):
                raise _Refused(LLMStatusCode.LLM_LINK_FAILED, f"cannot map the peer: {error}") from error
            if me.options.transport != "tcp":
                logger.info("cluster_id=%d: not mapped, using TCP: %s", reply.cluster_id, error)
            return None

    def _unlink(self, address: Address, deadline: float) -> LLMStatusCode:
        sock = self._connect(address, deadline, "unlink")
        try:
            send_message(sock, Unlink(cluster_id=self._identity.cluster_id), deadline)
            return to_status(receive_message(sock, Done, deadline).status)
        finally:
            close(sock)
