# SPDX-License-Identifier: Apache-2.0
"""The C++ host data plane: `NativePlane` serves this process's caches, `NativeLink` reads and writes a peer's.

Wrappers only; what a status means to the interface is decided in `datadist/host/link.py`. Any thread may call; every
call that moves bytes or waits runs without the interpreter's lock, in its caller's thread and the plane's own.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from vllm_ascend_pd.native import library
from vllm_ascend_pd.native.pool import CopyPool

MAX_CONNECTIONS: Final = 16  # kMaxConnections of csrc_npu/include/pd/plane.h
_TEXT_BYTES: Final = 256

_INT64, _UINT64 = ctypes.c_int64, ctypes.c_uint64
_HANDLE, _INTEGER, _WORDS = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p


class LinkStatus(enum.IntEnum):
    """How a transfer ended (pd::LinkStatus)."""

    OK = 0
    TIMEOUT = 1
    PEER_GONE = 2
    PEER_UNLINKED = 3
    BAD_FRAME = 4
    REFUSED = 5
    LOCAL_FAULT = 6
    CLOSED = 7
    BAD_LOCAL_BLOCK = 8
    BAD_REMOTE_BLOCK = 9
    TOO_MANY_RUNS = 10
    INVALID = 11


class LinkEventKind(enum.IntEnum):
    """What became of a link's incoming side (pd::LinkEvent)."""

    NONE = 0
    FAREWELL = 1
    VANISHED = 2
    BROKEN = 3


class LinkEvent(NamedTuple):
    """One per link at most."""

    link_id: int
    kind: LinkEventKind
    text: str


class Outcome(NamedTuple):
    """How a transfer ended; `value` is the block or the number of runs that was refused."""

    status: LinkStatus
    peer_status: int
    value: int
    text: str


class LinkStats(NamedTuple):
    """What a link's successful transfers took so far."""

    calls: int = 0
    runs: int = 0  # descriptors
    pieces: int = 0  # contiguous pieces of memory
    num_bytes: int = 0
    posting_ns: int = 0  # until all requests were sent, or the copy was planned
    moving_ns: int = 0
    failures: int = 0


class PlaneStats(NamedTuple):
    """What this process has served."""

    connections: int = 0  # now
    requests: int = 0
    refused: int = 0
    num_bytes: int = 0
    bad_frames: int = 0
    stalled: int = 0


@dataclass(frozen=True)
class Moves:
    """Blocks of a range of tensors, on both sides; block i lies at base + blocks[i] * block_bytes of each tensor."""

    local_tensor: int
    remote_tensor: int
    num_tensors: int
    local_blocks: array[int]  # of typecode q, like the other
    remote_blocks: array[int]
    block_bytes: int
    last_bytes: int  # of the last block
    local_base: int = 0
    remote_base: int = 0


class _Transfer(ctypes.Structure):
    """pd_transfer."""

    _fields_ = [
        ("local_cache", _INT64),
        ("remote_cache", _INT64),
        ("local_tensor_start", _UINT64),
        ("remote_tensor_start", _UINT64),
        ("num_tensors", _UINT64),
        ("local_base", _UINT64),
        ("remote_base", _UINT64),
        ("block_bytes", _UINT64),
        ("last_bytes", _UINT64),
        ("num_blocks", _UINT64),
        ("local_blocks", _WORDS),
        ("remote_blocks", _WORDS),
        ("max_words", _UINT64),
        ("deadline_ns", _INT64),
    ]


class _Outcome(ctypes.Structure):
    """pd_outcome."""

    _fields_ = [
        ("status", ctypes.c_int32),
        ("peer_status", ctypes.c_uint32),
        ("value", _INT64),
        ("text", ctypes.c_char * _TEXT_BYTES),
    ]


class _Event(ctypes.Structure):
    """pd_event."""

    _fields_ = [("link_id", _UINT64), ("kind", ctypes.c_int32), ("text", ctypes.c_char * _TEXT_BYTES)]


class _Functions:
    """The C functions, declared once."""

    def __init__(self) -> None:
        declare = library.declare
        move = [_HANDLE, ctypes.c_void_p, ctypes.c_void_p]
        cache = [_HANDLE, _INT64, _UINT64, _WORDS, _UINT64, _INTEGER]
        self.create = declare("pd_plane_create", _HANDLE, [ctypes.c_uint32, _INT64, _HANDLE])
        self.free = declare("pd_plane_free", None, [_HANDLE])
        self.add_cache = declare("pd_plane_add_cache", _INTEGER, cache)
        self.remove_cache = declare("pd_plane_remove_cache", _INTEGER, [_HANDLE, _INT64, _INT64])
        self.open_link = declare("pd_plane_open_link", _HANDLE, [_HANDLE, _UINT64, _WORDS, _UINT64, _WORDS, _INT64])
        self.wait_event = declare("pd_plane_wait_event", _INTEGER, [_HANDLE, _INT64, ctypes.c_void_p])
        self.wake = declare("pd_plane_wake", None, [_HANDLE])
        self.stats = declare("pd_plane_stats", None, [_HANDLE, _WORDS])
        self.link_id = declare("pd_link_id", _UINT64, [_HANDLE])
        self.link_add_cache = declare("pd_link_add_cache", _INTEGER, [_HANDLE, _INT64, _UINT64, _UINT64, _WORDS])
        self.link_read = declare("pd_link_read", _INTEGER, move)
        self.link_write = declare("pd_link_write", _INTEGER, move)
        self.link_cut = declare("pd_link_cut", None, [_HANDLE])
        self.link_close = declare("pd_link_close", None, [_HANDLE, _INT64])
        self.link_free = declare("pd_link_free", None, [_HANDLE])
        self.link_stats = declare("pd_link_stats", None, [_HANDLE, _WORDS])
        self.blocks_range = declare("pd_blocks_range", None, [_UINT64, _WORDS, _WORDS])


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    return _Functions()


def find_range(blocks: array[int]) -> tuple[int, int]:
    """Lowest and highest of an array of typecode q; (0, -1) for none."""
    found = (_INT64 * 2)()
    address, count = blocks.buffer_info()
    _functions().blocks_range(count, address, ctypes.byref(found))
    return found[0], found[1]


class NativeLink:
    """Our and the peer's connections of one link. Dropping it ends them."""

    def __init__(self, handle: int, plane: NativePlane) -> None:
        functions = _functions()
        self._handle, self._plane = handle, plane  # the plane outlives its links
        self._read, self._write = functions.link_read, functions.link_write
        self._free = weakref.finalize(self, functions.link_free, handle)
        self._free.atexit = False
        self.link_id: int = functions.link_id(handle)

    def add_cache(self, cache_id: int, num_tensors: int, tensor_bytes: int, mapped: Sequence[int] | None) -> None:
        """A cache of the peer's, and where its tensors are mapped here. Before the first transfer."""
        words = array("Q", mapped) if mapped is not None else None
        address = words.buffer_info()[0] if words is not None else None
        library.check(_functions().link_add_cache(self._handle, cache_id, num_tensors, tensor_bytes, address))

    def transfer(
        self, local_cache: int, remote_cache: int, moves: Moves, max_words: int, deadline: float, *, is_write: bool
    ) -> Outcome:
        """Move all of it, in one call; blocks until nothing is touched any more."""
        local, remote = moves.local_blocks, moves.remote_blocks
        request = _Transfer(
            local_cache,
            remote_cache,
            moves.local_tensor,
            moves.remote_tensor,
            moves.num_tensors,
            moves.local_base,
            moves.remote_base,
            moves.block_bytes,
            moves.last_bytes,
            len(local),
            local.buffer_info()[0],
            remote.buffer_info()[0],
            max_words,
            int(deadline * 1e9),
        )
        if len(local) != len(remote):
            raise ValueError(f"{len(local)} local and {len(remote)} remote blocks")
        how = _Outcome()
        function = self._write if is_write else self._read
        library.check(function(self._handle, ctypes.byref(request), ctypes.byref(how)))
        if how.status == LinkStatus.OK:
            return _OK
        return Outcome(LinkStatus(how.status), how.peer_status, how.value, how.text.decode(errors="replace"))

    def stats(self) -> LinkStats:
        """Counters since the link was made."""
        words = (_UINT64 * len(LinkStats._fields))()
        _functions().link_stats(self._handle, ctypes.byref(words))
        return LinkStats(*words)

    def cut(self) -> None:
        """End a transfer that runs, and all connections, without a word to the peer."""
        _functions().link_cut(self._handle)

    def close(self, timeout_s: float) -> None:
        """Say farewell; answers that are on their way may take `timeout_s`, then they are cut."""
        _functions().link_close(self._handle, int(max(0.0, timeout_s) * 1000))


_OK: Final = Outcome(LinkStatus.OK, 0, 0, "")


class NativePlane:
    """Threads that serve this process's registered caches to all linked peers."""

    def __init__(self, num_threads: int, timeout_ms: int, pool: CopyPool | None) -> None:
        functions = _functions()
        handle = functions.create(num_threads, timeout_ms, pool.handle if pool is not None else None)
        self._handle = library.check_handle(handle)
        self._pool = pool
        self._free = weakref.finalize(self, functions.free, self._handle)
        self._free.atexit = False

    def add_cache(self, cache_id: int, addresses: Sequence[int], tensor_bytes: int, *, accessible: bool) -> None:
        """Serve a cache. Raises ValueError."""
        words = array("Q", addresses)
        address, count = words.buffer_info()
        library.check(_functions().add_cache(self._handle, cache_id, count, address, tensor_bytes, accessible))

    def remove_cache(self, cache_id: int, timeout_s: float) -> bool:
        """Serve it no longer; False when its memory is still touched at the end of the timeout."""
        return library.check(_functions().remove_cache(self._handle, cache_id, int(timeout_s * 1000))) == 1

    def open_link(self, request_fds: Iterable[int], serve_fds: Iterable[int], last_local_cache: int) -> NativeLink:
        """Takes the descriptors: we ask over the first and serve the second. Raises ValueError."""
        request, serve = array("i", request_fds), array("i", serve_fds)
        handle = _functions().open_link(
            self._handle, len(request), request.buffer_info()[0], len(serve), serve.buffer_info()[0], last_local_cache
        )
        return NativeLink(library.check_handle(handle), self)

    def wait_event(self, timeout_s: float) -> LinkEvent | None:
        """The next event; None at the timeout or after `wake`."""
        event = _Event()
        if library.check(_functions().wait_event(self._handle, int(timeout_s * 1000), ctypes.byref(event))) == 0:
            return None
        return LinkEvent(event.link_id, LinkEventKind(event.kind), event.text.decode(errors="replace"))

    def wake(self) -> None:
        """End all waits for events."""
        _functions().wake(self._handle)

    def stats(self) -> PlaneStats:
        """Counters since the plane was made."""
        words = (_UINT64 * len(PlaneStats._fields))()
        _functions().stats(self._handle, ctypes.byref(words))
        return PlaneStats(*words)

    def close(self) -> None:
        """End all connections and join the threads; no call may run or follow."""
        self._free()
