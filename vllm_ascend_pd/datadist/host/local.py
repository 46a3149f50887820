# SPDX-License-Identifier: Apache-2.0
"""Copies between local caches (§4.7): no link, no peer, the caller's thread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_ascend_pd.datadist.host.copying import copy_runs
from vllm_ascend_pd.datadist.host.runs import check_blocks, pair_blocks
from vllm_ascend_pd.datadist.host.table import CacheTable
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import Cache, Placement


def _copy(dst: Sequence[int], src: Sequence[int], offsets: tuple[list[int], list[int], list[int]]) -> None:
    src_offsets, dst_offsets, sizes = offsets
    try:
        copy_runs(
            [base + offset for base in dst for offset in dst_offsets],
            [base + offset for base in src for offset in src_offsets],
            sizes * len(src),
            math.inf,
        )
    except OSError as error:
        fail(LLMStatusCode.LLM_FAILED, str(error))


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
        starts = slots[1] * src.slot_bytes + offset, slots[0] * dst.slot_bytes + offset
        _copy(dst.addresses, src.addresses, ([starts[0]], [starts[1]], [num_bytes]))


def copy_blocks(caches: CacheTable, cache_id: int, pairs: list[tuple[int, int]]) -> None:
    """`pairs` are (source, destination). Raises LLMException."""
    with caches.use(cache_id) as cache:
        src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        check_blocks("source", src, cache.num_slots)
        check_blocks("destination", dst, cache.num_slots)
        # One block a run, in the caller's order: a destination may be a later pair's source.
        for pair in pairs:
            _copy(cache.addresses, cache.addresses, pair_blocks(pair[:1], pair[1:], cache.slot_bytes))


def swap_blocks(src: Cache, dst: Cache, pairs: list[tuple[int, int]]) -> None:
    """`pairs` are (source, destination). Raises LLMException(LLM_PARAM_INVALID)."""
    require(src.is_blocks_cache and dst.is_blocks_cache, "swap_blocks takes blocks caches")
    src_desc, dst_desc = src.cache_desc, dst.cache_desc
    require(src_desc.num_tensors == dst_desc.num_tensors, "swap_blocks: num_tensors differ")
    places = {src_desc.placement, dst_desc.placement}
    require(places == {Placement.HOST, Placement.DEVICE}, "swap_blocks: exactly one side must be HOST")
    src_bytes, dst_bytes = src_desc.size // src_desc.batch_size, dst_desc.size // dst_desc.batch_size
    require(src_bytes == dst_bytes, f"swap_blocks: block bytes differ: {src_bytes} and {dst_bytes}")
    src_blocks, dst_blocks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_blocks("source", src_blocks, src_desc.batch_size)
    check_blocks("destination", dst_blocks, dst_desc.batch_size)
    _copy(dst.tensor_addrs, src.tensor_addrs, pair_blocks(src_blocks, dst_blocks, src_bytes))
