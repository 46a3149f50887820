# SPDX-License-Identifier: Apache-2.0
"""Copies on host memory by the C++ core: plans, execution in this thread, and pools of copy threads.

Pure wrappers: no thread of their own; any thread may call. Everything that copies releases the interpreter's lock and
takes absolute deadlines on the clock of `time.monotonic()`. Addresses are not checked: whoever makes a plan
guarantees that both sides stay mapped until the copy is done.
"""

from __future__ import annotations

import ctypes
import enum
import math
import time
import weakref
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from vllm_ascend_pd.native import library

BlockIds = Any  # Sequence[int], or a contiguous int64 buffer (array("q"), numpy), which is not copied
Addresses = Any  # Sequence[int], or a contiguous uint64 or int64 buffer

_INT64, _UINT64 = ctypes.c_int64, ctypes.c_uint64
_NO_DEADLINE: Final = -1
_SLICE_WORDS: Final = 6


class Stores(enum.IntEnum):
    """Auto: non-temporal from `PD_COPY_NONTEMPORAL_BYTES` on, for what is larger than it pays to keep in a cache."""

    AUTO = 0
    TEMPORAL = 1
    NON_TEMPORAL = 2


class CopyState(enum.IntEnum):
    """How a copy stands; the destination's bytes are undefined unless it is DONE."""

    RUNNING = 0
    DONE = 1
    CANCELLED = 2
    DEADLINE = 3


_STATES: Final = tuple(CopyState)  # by value


class BlockSlice(tuple[int, int, int, int, int, int]):
    """What of a block is moved: `num_bytes` at an offset, repeated `count` times at fixed distances (tokens, heads)."""

    __slots__ = ()

    def __new__(
        cls,
        src_offset: int,
        dst_offset: int,
        num_bytes: int,
        count: int = 1,
        src_stride: int = 0,
        dst_stride: int = 0,
    ) -> BlockSlice:
        """Offsets and strides in bytes, the offsets from the block's start."""
        return super().__new__(cls, (src_offset, dst_offset, num_bytes, count, src_stride, dst_stride))


class _Pairs(ctypes.Structure):
    """pd_block_pairs."""

    _fields_ = [
        ("num_tensors", _UINT64),
        ("src_tensors", ctypes.c_void_p),
        ("dst_tensors", ctypes.c_void_p),
        ("src_block_stride", _UINT64),
        ("dst_block_stride", _UINT64),
        ("num_slices", _UINT64),
        ("slices", ctypes.c_void_p),
        ("num_blocks", _UINT64),
        ("src_blocks", ctypes.c_void_p),
        ("dst_blocks", ctypes.c_void_p),
        ("src_shifts", ctypes.c_void_p),
        ("dst_shifts", ctypes.c_void_p),
    ]


class _Functions:
    """The C functions, declared once."""

    def __init__(self) -> None:
        handle, integer, words = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        copy = [handle, integer, _INT64, words, _UINT64]
        declare = library.declare
        self.plan_create = declare("pd_plan_create", handle, [integer])
        self.plan_add = declare("pd_plan_add", integer, [handle, words])
        self.plan_free = declare("pd_plan_free", None, [handle])
        self.plan_num_bytes = declare("pd_plan_num_bytes", _UINT64, [handle])
        self.plan_num_pieces = declare("pd_plan_num_pieces", _UINT64, [handle])
        self.plan_num_runs = declare("pd_plan_num_runs", _UINT64, [handle])
        self.plan_num_pairs = declare("pd_plan_num_pairs", _UINT64, [handle])
        self.execute = declare("pd_execute", integer, copy)
        self.checksum = declare("pd_checksum", integer, [handle, integer, words, _UINT64])
        self.copy_groups = declare("pd_copy_groups", integer, [words, _UINT64, _UINT64, words, words, integer, _INT64])
        self.pool_create = declare("pd_pool_create", handle, [ctypes.c_uint32, words, _UINT64])
        self.pool_free = declare("pd_pool_free", None, [handle])
        self.submit = declare("pd_submit", handle, [handle, *copy])
        self.job_poll = declare("pd_job_poll", integer, [handle])
        self.job_wait = declare("pd_job_wait", integer, [handle, _INT64])
        self.job_cancel = declare("pd_job_cancel", None, [handle])
        self.job_free = declare("pd_job_free", None, [handle])
        self.kernel_name = declare("pd_kernel_name", ctypes.c_char_p, [])
        self.crc32c_name = declare("pd_crc32c_name", ctypes.c_char_p, [])
        self.crc32c = declare("pd_crc32c", ctypes.c_uint32, [ctypes.c_uint32, words, _UINT64])


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    return _Functions()


def _to_words(values: Any, typecode: str = "q") -> tuple[Any, int, int]:
    """(what keeps the memory alive, its address, how many 8-byte words), without a Python step per element."""
    if isinstance(values, array) and values.typecode in "qQ":
        return values, values.buffer_info()[0], len(values)
    interface = getattr(values, "__array_interface__", None)
    if interface is not None and interface["typestr"] in ("<i8", "<u8") and interface.get("strides") is None:
        return values, interface["data"][0], len(values)
    words = array(typecode, values)
    return words, words.buffer_info()[0], len(words)


def _to_timeout_ms(deadline: float | None) -> int:
    """From a deadline on the monotonic clock; never early, at most a millisecond late."""
    if deadline is None or deadline == math.inf:
        return _NO_DEADLINE
    return min(max(0, math.ceil((deadline - time.monotonic()) * 1000)), (1 << 62))


class CopyGroup:
    """What one cache group always has: its tensors on both sides, strides and slices. Made once, used for many copies.

    `slices`: what of each block is moved; by default the whole block of `block_bytes`, which is also the default of
    both strides. Raises ValueError for unlike numbers of tensors.
    """

    def __init__(
        self,
        src_tensors: Addresses,
        dst_tensors: Addresses,
        block_bytes: int,
        *,
        src_block_stride: int | None = None,
        dst_block_stride: int | None = None,
        slices: Sequence[BlockSlice] | None = None,
    ) -> None:
        src, src_address, num_tensors = _to_words(src_tensors, "Q")
        dst, dst_address, num_dst = _to_words(dst_tensors, "Q")
        if num_tensors != num_dst:
            raise ValueError(f"{num_tensors} source tensors and {num_dst} destination tensors")
        chosen = [BlockSlice(0, 0, block_bytes)] if slices is None else slices
        words = array("q", [word for part in chosen for word in part])
        self.memory = (src, dst, words)
        self.num_tensors = num_tensors
        self.pairs = _Pairs(
            num_tensors=num_tensors,
            src_tensors=src_address,
            dst_tensors=dst_address,
            src_block_stride=block_bytes if src_block_stride is None else src_block_stride,
            dst_block_stride=block_bytes if dst_block_stride is None else dst_block_stride,
            num_slices=len(words) // _SLICE_WORDS,
            slices=words.buffer_info()[0],
        )
        self._single = CopyGroups([self])

    def copy(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        stores: Stores = Stores.AUTO,
        deadline: float | None = None,
    ) -> CopyState:
        """`CopyGroups.copy` of this group alone."""
        return self._single.copy(src_blocks, dst_blocks, stores=stores, deadline=deadline)


class CopyGroups:
    """Groups whose blocks go together, such as an MLA layer's latent and rope parts: one call for all of them."""

    def __init__(self, groups: Sequence[CopyGroup]) -> None:
        self._alive = [(group.pairs, group.memory) for group in groups]  # not the groups: one of them holds this
        self._table = array("Q", (ctypes.addressof(pairs) for pairs, _ in self._alive))
        self._address = self._table.buffer_info()[0]
        self._copy = _functions().copy_groups

    def copy(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        stores: Stores = Stores.AUTO,
        deadline: float | None = None,
    ) -> CopyState:
        """Plan and copy in one call of the library: the fast path for a request. DONE or DEADLINE.

        Raises ValueError for arguments that do not fit together.
        """
        src, src_address, num_blocks = _to_words(src_blocks)
        dst, dst_address, num_dst = _to_words(dst_blocks)
        if num_blocks != num_dst:
            raise ValueError(f"{num_blocks} source blocks and {num_dst} destination blocks")
        timeout_ms = _NO_DEADLINE if deadline is None else _to_timeout_ms(deadline)
        code = self._copy(self._address, len(self._table), num_blocks, src_address, dst_address, stores, timeout_ms)
        return _STATES[code] if code >= 0 else CopyState(library.check(code))


class CopyPlan:
    """Which bytes go where, for any number of groups; adjacent pieces are merged. Not to be changed while it is copied.

    With `checksums` a copy yields one CRC32C per block pair, in the order in which the pairs were added. It depends on
    the pair's bytes and on the order of tensors and slices only, so both sides of a wire can compare it: it is the
    CRC32C of the tensors' CRC32Cs, each 4 bytes, little-endian, in table order.
    """

    def __init__(self, *, checksums: bool = False) -> None:
        functions = _functions()
        self.has_checksums = checksums
        self.handle = library.check_handle(functions.plan_create(int(checksums)))
        weakref.finalize(self, functions.plan_free, self.handle).atexit = False

    def add(
        self,
        src_tensors: Addresses,
        dst_tensors: Addresses,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        block_bytes: int,
    ) -> None:
        """Add whole blocks of one group: block i lies at `i * block_bytes` of each tensor. Raises ValueError."""
        self.add_group(CopyGroup(src_tensors, dst_tensors, block_bytes), src_blocks, dst_blocks)

    def add_group(
        self,
        group: CopyGroup,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        src_shifts: BlockIds | None = None,
        dst_shifts: BlockIds | None = None,
    ) -> None:
        """Add block pairs of one group. `shifts`: bytes added to each block's place (blocks of unlike sizes).

        Raises ValueError for unequal lengths, negative ids, zero sizes, addresses that overflow.
        """
        src, src_address, num_blocks = _to_words(src_blocks)
        lists = [src]
        pairs = _Pairs.from_buffer_copy(group.pairs)
        pairs.num_blocks, pairs.src_blocks = num_blocks, src_address
        for name, values in (("dst_blocks", dst_blocks), ("src_shifts", src_shifts), ("dst_shifts", dst_shifts)):
            if values is None:
                continue
            words, address, count = _to_words(values)
            if count != num_blocks:
                raise ValueError(f"{num_blocks} src_blocks and {count} {name}")
            lists.append(words)
            setattr(pairs, name, address)
        library.check(_functions().plan_add(self.handle, ctypes.addressof(pairs)))

    @property
    def num_bytes(self) -> int:
        """Of all pairs."""
        return int(_functions().plan_num_bytes(self.handle))

    @property
    def num_pieces(self) -> int:
        """Contiguous pieces after merging."""
        return int(_functions().plan_num_pieces(self.handle))

    @property
    def num_runs(self) -> int:
        """Records that the plan holds; each stands for pieces at even distances, in all tensors of its group."""
        return int(_functions().plan_num_runs(self.handle))

    @property
    def num_pairs(self) -> int:
        """Block pairs that were added: as many checksums has a copy of a plan with checksums."""
        return int(_functions().plan_num_pairs(self.handle))

    def checksum_source(self) -> array[int]:
        """The checksums over the source's bytes as they are now, without a copy: what the other side compares."""
        return self._checksum(0)

    def checksum_destination(self) -> array[int]:
        """The checksums over the destination's bytes as they are now."""
        return self._checksum(1)

    def _checksum(self, side: int) -> array[int]:
        places = make_places(self)
        library.check(_functions().checksum(self.handle, side, places.buffer_info()[0], len(places)))
        return places


def make_places(plan: CopyPlan) -> array[int]:
    """Zeros, one for each checksum that a copy of the plan yields."""
    return array("I", bytes(4 * plan.num_pairs if plan.has_checksums else 0))


def execute(
    plan: CopyPlan,
    *,
    stores: Stores = Stores.AUTO,
    deadline: float | None = None,
    checksums: array[int] | None = None,
) -> CopyState:
    """Copy in this thread: DONE, or DEADLINE. `checksums` (from `make_places`) are filled in.

    Raises ValueError when the places for checksums are not as many as the plan's.
    """
    address, count = (0, 0) if checksums is None else checksums.buffer_info()
    if checksums is None and plan.has_checksums:
        checksums = make_places(plan)  # nobody wants them, but they come
        address, count = checksums.buffer_info()
    code = _functions().execute(plan.handle, stores, _to_timeout_ms(deadline), address, count)
    return CopyState(library.check(code))


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """CRC32C of contiguous bytes, continuing `crc`."""
    view = memoryview(data).cast("B")
    block: Any = bytes(view)
    return int(_functions().crc32c(crc, block, len(block)))


def kernel_name() -> str:
    """Which copy kernels run here. Raises ValueError for a `PD_COPY_KERNEL` that this CPU has not."""
    name: bytes | None = _functions().kernel_name()
    if name is None:
        raise ValueError(library.last_error())
    return name.decode()
