# SPDX-License-Identifier: Apache-2.0
"""One two-sided link (a "comm"): who belongs to it, how far its preparation is; and the words that members exchange.

On a connection of purpose `comm`, from the lower rank to the higher: Join -> Verdict, then, once the lower rank has
made the link itself, Linked. Strangers to each other in name or table are refused by naming what differs.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from typing import Final, TypeVar

import msgspec

from vllm_ascend_pd.datadist.host.framing import BadFrame, cut, receive_frame, send_frame
from vllm_ascend_pd.datadist.host.link import Link
from vllm_ascend_pd.datadist.host.rank_table import Address
from vllm_ascend_pd.datadist.types import RegisterMemStatus

MAX_JOIN_BYTES: Final = 4 << 10
GO, WAIT, REFUSED = "go", "wait", "refused"


class Join(msgspec.Struct, tag="join", frozen=True, kw_only=True):
    """The lower rank's first word."""

    name: str
    digest: bytes  # of cluster_rank_info and rank table
    source: int
    target: int


class Verdict(msgspec.Struct, tag="verdict", frozen=True, kw_only=True):
    """`go`, `wait` (`link` has not been called here yet) or `refused`."""

    word: str
    reason: str = ""


class Linked(msgspec.Struct, tag="linked", frozen=True, kw_only=True):
    """The lower rank has made the link."""


_Message = TypeVar("_Message", Join, Verdict, Linked)
_encode = msgspec.msgpack.Encoder().encode


def send(sock: socket.socket, message: Join | Verdict | Linked, deadline: float) -> None:
    """Raises ChannelError."""
    send_frame(sock, _encode(message), deadline)


def receive(sock: socket.socket, kind: type[_Message], deadline: float) -> _Message:
    """Raises ChannelError, BadFrame for anything else."""
    try:
        message: _Message = msgspec.msgpack.decode(receive_frame(sock, deadline, MAX_JOIN_BYTES), type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"not a {kind.__name__}: {error}") from error
    return message


def digest_table(ranks: dict[int, int], addresses: dict[int, Address]) -> bytes:
    """Alike on members that were given the same table, however it is formatted."""
    text = json.dumps([sorted(ranks.items()), sorted(addresses.items())])
    return hashlib.sha256(text.encode()).digest()


class Comm:
    """One two-sided link. `changed` guards `links`, `status` and what follows it."""

    def __init__(
        self, comm_id: int, name: str, own_id: int, ranks: dict[int, int], addresses: dict[int, Address]
    ) -> None:
        self.comm_id = comm_id
        self.name = name
        self.digest = digest_table(ranks, addresses)
        self.own_address = addresses[ranks[own_id]]
        self.lower = {cluster for cluster, rank in ranks.items() if rank < ranks[own_id]}
        self.higher = {
            cluster: addresses[rank] for cluster, rank in ranks.items() if rank >= ranks[own_id] and cluster != own_id
        }
        self.changed = threading.Condition()
        self.links: dict[int, Link] = {}
        self.status = RegisterMemStatus.PREPARING
        self.reason = ""  # why it failed or is to end
        self.is_settled = False  # the preparing thread has ended
        self._sock: socket.socket | None = None

    @property
    def peers(self) -> set[int]:
        """All members but this process."""
        return self.lower | set(self.higher)

    @property
    def is_given_up(self) -> bool:
        """Cancelled or refused."""
        return self.reason != ""

    def give_up(self, reason: str) -> None:
        """Stop the preparation; the first reason stays."""
        with self.changed:
            self.reason = self.reason or reason
            if self._sock is not None:
                cut(self._sock)
            self.changed.notify_all()

    def watch(self, sock: socket.socket | None) -> None:
        """The connection that `give_up` has to cut; None: no more."""
        with self.changed:
            self._sock = sock
            if sock is not None and self.reason:
                cut(sock)

    def add_link(self, cluster_id: int, link: Link) -> bool:
        """A member is linked; False when that comes too late, and the caller has to end the link."""
        with self.changed:
            if self.is_given_up:
                return False
            self.links[cluster_id] = link
            self.changed.notify_all()
            return True

    def wait_links(self, deadline: float) -> bool:
        """Whether all members are linked before the deadline."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.is_given_up or set(self.links) >= self.peers, max(0.0, deadline - time.monotonic())
            )
            return set(self.links) >= self.peers

    def pause(self, seconds: float) -> None:
        """Wait, but not when given up."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_given_up, seconds)

    def settle(self, status: RegisterMemStatus) -> None:
        """The preparation has ended."""
        with self.changed:
            self.status, self.is_settled = status, True
            self.changed.notify_all()

    def wait_settled(self, timeout_s: float) -> bool:
        """Whether the preparation has ended."""
        with self.changed:
            return self.changed.wait_for(lambda: self.is_settled, timeout_s)
