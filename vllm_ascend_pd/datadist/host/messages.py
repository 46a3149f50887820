# SPDX-License-Identifier: Apache-2.0
"""Every message between two host engines, as msgpack of tagged msgspec Structs. Nothing here is executable.

Order on a new connection: Hello, Challenge, Proof (both sides have then proved that they know the secret),
and what Hello's `purpose` says:

- `link`: Connect -> ConnectReply, then Ready -> Ready; afterwards the dialler reads and writes the listener's
  memory over it.
- `data`: nothing; one more connection of the same kind. `reverse`: nothing; the listener reads and writes the
  dialler's memory over it. There are as many connections in either direction as ConnectReply says.
- `arenas` (Unix socket only): both sides pass the descriptors of their arenas, announced by Arenas.
- `unlink`: Unlink -> Done.

After Ready the connections belong to the C++ plane on both sides; its frames are in csrc_npu/host/plane/wire.h.

History of PROTOCOL: 1, first release. 2, several connections per link; bytes, and the requests for them, are frames
of the C++ plane with strided runs instead of messages.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

PROTOCOL: Final = 2
NONCE_BYTES: Final = 32


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """The dialler's first word."""

    protocol: int
    purpose: str
    nonce: bytes
    link_token: bytes = b""  # which link a `data`, `reverse` or `arenas` connection belongs to


class Challenge(msgspec.Struct, tag="challenge", frozen=True, kw_only=True):
    """The listener proves that it knows the secret and asks for the same."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag="proof", frozen=True, kw_only=True):
    """The dialler proves that it knows the secret."""

    proof: bytes


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One registered cache, as a peer sees it. Without access, only its identity counts."""

    cache_id: int
    is_blocks: bool
    accessible: bool
    num_tensors: int
    tensor_bytes: int
    num_slots: int  # blocks, or batch slots
    req_keys: list[tuple[int, int, int]]  # (req id, model id, batch index); blocks: req id 2**64-1
    arena_ids: list[int]  # per tensor; -1: not in an arena
    arena_offsets: list[int]

    @property
    def slot_bytes(self) -> int:
        """Distance between two blocks or batch slots."""
        return self.tensor_bytes // self.num_slots


class Connect(msgspec.Struct, tag="connect", frozen=True, kw_only=True):
    """Everything about the dialler that the link needs."""

    cluster_id: int
    instance: bytes  # random per process
    force: bool  # the dialler has no such link: a link that the listener still holds is stale
    remote_accessible: bool
    transport: str  # auto, mapped or tcp
    boot_id: str
    caches: list[CacheEntry]
    connections: int  # in either direction, at most


class ConnectReply(msgspec.Struct, tag="connect_reply", frozen=True, kw_only=True):
    """Everything about the listener; without success only the first two fields count."""

    status: int
    reason: str = ""
    cluster_id: int = 0
    instance: bytes = b""
    transport: str = ""
    boot_id: str = ""
    descriptor_socket: str = ""  # abstract Unix socket, empty: none
    link_token: bytes = b""
    caches: list[CacheEntry] = []
    connections: int = 0  # in either direction: what both allow


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """All channels stand (dialler); the link is usable (listener)."""

    status: int = 0
    reason: str = ""


class Arenas(msgspec.Struct, tag="arenas", frozen=True, kw_only=True):
    """The arenas whose descriptors follow, in order."""

    arena_ids: list[int]
    num_bytes: list[int]


class Unlink(msgspec.Struct, tag="unlink", frozen=True, kw_only=True):
    """Tear down the link to this cluster."""

    cluster_id: int


class Done(msgspec.Struct, tag="done", frozen=True, kw_only=True):
    """How an Unlink ended."""

    status: int


Message: TypeAlias = Hello | Challenge | Proof | Connect | ConnectReply | Ready | Arenas | Unlink | Done

encode: Final = msgspec.msgpack.Encoder().encode
decoder: Final = msgspec.msgpack.Decoder(Message)
