# SPDX-License-Identifier: Apache-2.0
"""Copies between local caches (§4.7): no link, no peer, the caller's thread; one native call for all tensors.

Addresses are not checked: whoever registered them guarantees that the memory is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_ascend_pd.datadist.host.table import CacheTable
from vllm_ascend_pd.datadist.status import require
from vllm_ascend_pd.datadist.types import Cache, Placement
from vllm_ascend_pd.native.copying import CopyGroup

Pairs = Sequence[tuple[int, int]]  # (source, destination)


def _copy(src: Sequence[int], dst: Sequence[int], block_bytes: int, pairs: Pairs) -> None:
    group = CopyGroup(src, dst, block_bytes)
    for part in split_by_order(pairs, same_memory=src is dst):
        group.copy([pair[0] for pair in part], [pair[1] for pair in part])


def _check_bounds(side: str, blocks: Sequence[int], num_blocks: int) -> None:
    if blocks:
        low, high = min(blocks), max(blocks)
        require(low >= 0 and high < num_blocks, f"{side} blocks {low}..{high} of a cache of {num_blocks} blocks")


def split_by_order(pairs: Pairs, *, same_memory: bool) -> Iterator[Pairs]:
    """Parts that may be copied in any order, while the parts keep theirs.

    Nothing is written twice in a part; with `same_memory` nothing is written and read, either.
    """
    start = 0
    written: set[int] = set()
    read: set[int] = set()
    for position, (src, dst) in enumerate(pairs):
        if dst in written or (same_memory and (src in written or dst in read)):
            yield pairs[start:position]
            start = position
            written, read = set(), set()
        written.add(dst)
        read.add(src)
    if start < len(pairs):
        yield pairs[start:]


def copy_cache(caches: CacheTable, dst_id: int, src_id: int, slots: tuple[int, int], offset: int, size: int) -> None:
    """`slots` are (destination, source) batch indices. Raises LLMException."""
    with caches.use(dst_id) as dst, caches.use(src_id) as src:
        require(dst.num_tensors == src.num_tensors, f"{src.num_tensors} source, {dst.num_tensors} destination tensors")
        require(
            slots[0] < dst.num_slots and slots[1] < src.num_slots,
            f"batch indices {slots} of caches of {dst.num_slots} and {src.num_slots} slots",
        )
        require(0 <= offset < src.slot_bytes, f"offset {offset} of a slot of {src.slot_bytes} bytes")
        num_bytes = src.slot_bytes - offset if size == -1 else size
        limit = min(src.slot_bytes, dst.slot_bytes)
        require(
            num_bytes > 0 and offset + num_bytes <= limit, f"size {size} at offset {offset}: slots of {limit} bytes"
        )
        if dst is src and slots[0] == slots[1]:
            return  # onto itself
        sources = [address + slots[1] * src.slot_bytes + offset for address in src.addresses]
        targets = [address + slots[0] * dst.slot_bytes + offset for address in dst.addresses]
        _copy(sources, targets, num_bytes, [(0, 0)])


def copy_blocks(caches: CacheTable, cache_id: int, pairs: list[tuple[int, int]]) -> None:
    """`pairs` are (source, destination). Raises LLMException."""
    with caches.use(cache_id) as cache:
        src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        _check_bounds("source", src, cache.num_slots)
        _check_bounds("destination", dst, cache.num_slots)
        _copy(cache.addresses, cache.addresses, cache.slot_bytes, pairs)


def swap_blocks(src: Cache, dst: Cache, pairs: list[tuple[int, int]]) -> None:
    """`pairs` are (source, destination). Raises LLMException(LLM_PARAM_INVALID)."""
    require(src.is_blocks_cache and dst.is_blocks_cache, "swap_blocks takes blocks caches")
    src_desc, dst_desc = src.cache_desc, dst.cache_desc
    require(src_desc.num_tensors == dst_desc.num_tensors, "swap_blocks: num_tensors differ")
    for cache in (src, dst):
        count = len(cache.tensor_addrs)
        require(count == cache.cache_desc.num_tensors, f"swap_blocks: {cache} has {count} addresses")
    places = {src_desc.placement, dst_desc.placement}
    require(places == {Placement.HOST, Placement.DEVICE}, "swap_blocks: exactly one side must be HOST")
    src_bytes, dst_bytes = src_desc.size // src_desc.batch_size, dst_desc.size // dst_desc.batch_size
    require(src_bytes == dst_bytes, f"swap_blocks: block bytes differ: {src_bytes} and {dst_bytes}")
    src_blocks, dst_blocks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    _check_bounds("source", src_blocks, src_desc.batch_size)
    _check_bounds("destination", dst_blocks, dst_desc.batch_size)
    _copy(src.tensor_addrs, dst.tensor_addrs, src_bytes, pairs)
