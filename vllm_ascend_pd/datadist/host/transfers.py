# SPDX-License-Identifier: Apache-2.0
"""Pure: what one pull or push asks for, its checks in the engine's order, and what it moves (§4.3, §4.5).

A pull's source is the peer, a push's source is this process. All refusals are LLMException with the code of
the reference's tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from vllm_ascend_pd.datadist.host.messages import CacheEntry
from vllm_ascend_pd.datadist.host.runs import check_blocks, select_tensors, split_into_blocks, to_block_array
from vllm_ascend_pd.datadist.host.table import RegisteredCache, find_entry, find_entry_by_id
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from vllm_ascend_pd.native.plane import Moves

Key: TypeAlias = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey


@dataclass(frozen=True)
class PullRequest:
    """One pull; `blocks` (source, destination) is None for pull_cache."""

    key: Key
    cache_id: int
    blocks: tuple[Sequence[int], Sequence[int]] | None
    src_layers: range | None = None
    dst_layers: range | None = None
    tensors_per_layer: int = 2
    batch_index: int = 0
    size: int = -1


@dataclass(frozen=True)
class PushRequest:
    """One push; `blocks` (source, destination) is None for push_cache. None for layers: all."""

    key: BlocksCacheKey | CacheKeyByIdAndIndex
    cache_id: int
    blocks: tuple[Sequence[int], Sequence[int]] | None
    src_layers: range | None = None
    dst_layers: range | None = None
    tensors_per_layer: int = 2
    batch_index: int = 0
    chunk_bytes: int = 0  # not 0: a batch slot is cut into blocks of so many bytes; `blocks` has no sources


def check_local_pull(local: RegisteredCache, request: PullRequest) -> None:
    """What the engine refuses before it looks for a link."""
    wants_blocks = request.blocks is not None
    require(
        local.is_blocks == wants_blocks,
        f"cache {local.cache_id} is {'a blocks cache' if local.is_blocks else 'not a blocks cache'}",
    )
    if request.blocks is None:
        in_range = request.batch_index < local.num_slots
        require(in_range, f"batch_index {request.batch_index} of a cache of {local.num_slots} slots")
        require(
            request.size <= local.slot_bytes, f"size {request.size} exceeds a local slot of {local.slot_bytes} bytes"
        )
    else:
        src, dst = request.blocks
        paired = not isinstance(request.key, BlocksCacheKey) or len(src) == len(dst)
        require(paired, f"{len(src)} source blocks for {len(dst)} destination blocks")
    if request.src_layers is not None or request.dst_layers is not None:
        divisible = local.num_tensors % request.tensors_per_layer == 0
        require(
            divisible, f"{local.num_tensors} local tensors are not a multiple of {request.tensors_per_layer} per layer"
        )
    if request.dst_layers is not None:
        stop = request.dst_layers.stop * request.tensors_per_layer
        require(stop <= local.num_tensors, f"dst_layer_range {request.dst_layers}: {local.num_tensors} tensors")


def check_local_memory(local: RegisteredCache, last_linked_id: int) -> None:
    """The local cache must have been registered, for remote access, before the link was made."""
    require(local.accessible, f"local cache {local.cache_id} is not remote_accessible")
    if local.cache_id > last_linked_id and not local.is_pooled:  # a pool is there from the start
        fail(
            LLMStatusCode.LLM_NOT_YET_LINK,
            f"local cache {local.cache_id} was registered after the link was made: unlink and link again",
        )


def resolve(entries: Sequence[CacheEntry], key: Key) -> tuple[CacheEntry, int]:
    """The peer's cache and batch index. Raises LLMException(LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID)."""
    if isinstance(key, BlocksCacheKey):
        entry, batch_index = find_entry(entries, INVALID_ID, key.model_id)
    elif isinstance(key, CacheKeyByIdAndIndex) and key.cache_id > 0:
        entry, batch_index = find_entry_by_id(entries, key.cache_id), key.batch_index
    elif isinstance(key, CacheKeyByIdAndIndex):
        # An id that is none falls through to the key (0, 0): clients rely on it (§4.3).
        entry, batch_index = find_entry(entries, 0, 0)
    else:
        by_request = key.req_id != INVALID_ID
        require(by_request != (key.prefix_id != INVALID_ID), "exactly one of req_id and prefix_id must be given")
        if not by_request:
            fail(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "prefix keys are not visible in direct mode")
        entry, batch_index = find_entry(entries, key.req_id, key.model_id)
    require(
        entry.is_blocks == isinstance(key, BlocksCacheKey),
        f"remote cache {entry.cache_id} is {'a blocks cache' if entry.is_blocks else 'not a blocks cache'}",
    )
    require(entry.accessible, f"remote cache {entry.cache_id} is not remote_accessible")
    if not entry.is_blocks:
        in_range = batch_index < entry.num_slots
        require(in_range, f"batch index {batch_index} of a remote cache of {entry.num_slots} slots")
    return entry, batch_index


def plan_pull(local: RegisteredCache, entry: CacheEntry, batch_index: int, request: PullRequest) -> Moves:
    """What a pull moves; source is `entry`, destination is `local`."""
    src, dst = select_tensors(
        local.num_tensors, entry.num_tensors, request.src_layers, request.dst_layers, request.tensors_per_layer
    )
    if request.blocks is None:
        size = local.slot_bytes if request.size == -1 else request.size
        require(size <= entry.slot_bytes, f"size {size} exceeds a remote slot of {entry.slot_bytes} bytes")
        local_base, remote_base = request.batch_index * local.slot_bytes, batch_index * entry.slot_bytes
        return Moves(dst.start, src.start, len(src), _one(), _one(), size, size, local_base, remote_base)
    src_blocks, dst_blocks = to_block_array(request.blocks[0]), to_block_array(request.blocks[1])
    block_bytes = local.slot_bytes
    if entry.is_blocks:
        require(entry.slot_bytes == block_bytes, f"block bytes differ: remote {entry.slot_bytes}, local {block_bytes}")
        return Moves(dst.start, src.start, len(src), dst_blocks, src_blocks, block_bytes, block_bytes)
    pieces, last_bytes = split_into_blocks(entry.slot_bytes, len(dst_blocks), block_bytes)
    remote_base = batch_index * entry.slot_bytes
    return Moves(dst.start, src.start, len(src), dst_blocks, pieces, block_bytes, last_bytes, 0, remote_base)


def _one() -> array[int]:
    return array("q", (0,))


def plan_push(local: RegisteredCache, entry: CacheEntry, batch_index: int, request: PushRequest) -> list[Moves]:
    """What each layer of a push moves; source is `local`, destination is `entry`."""
    per_layer = request.tensors_per_layer
    layers = range(local.num_tensors // per_layer)
    src_layers = layers if request.src_layers is None else request.src_layers
    dst_layers = layers if request.dst_layers is None else request.dst_layers
    require(len(src_layers) == len(dst_layers), f"{len(src_layers)} source and {len(dst_layers)} destination layers")
    if not src_layers:
        return []
    require(local.num_tensors % per_layer == 0, f"{local.num_tensors} tensors are no multiple of {per_layer} per layer")
    require(src_layers.stop * per_layer <= local.num_tensors, f"src_layer_range {src_layers} is outside the cache")
    require(
        dst_layers.stop * per_layer <= entry.num_tensors, f"dst_layer_range {dst_layers} is outside the peer's cache"
    )
    moves = _plan_layer(local, entry, batch_index, request)
    return [
        replace(moves, local_tensor=src * per_layer, remote_tensor=dst * per_layer)
        for src, dst in zip(src_layers, dst_layers, strict=True)
    ]


def _plan_layer(local: RegisteredCache, entry: CacheEntry, batch_index: int, request: PushRequest) -> Moves:
    """What is alike in each layer."""
    num_tensors = request.tensors_per_layer
    slot_base = request.batch_index * local.slot_bytes
    if request.blocks is None:
        in_range = request.batch_index < local.num_slots
        require(in_range, f"src_batch_index {request.batch_index} of a cache of {local.num_slots} slots")
        require(
            local.slot_bytes <= entry.slot_bytes,
            f"a local slot of {local.slot_bytes} bytes exceeds a remote one of {entry.slot_bytes}",
        )
        size, remote_base = local.slot_bytes, batch_index * entry.slot_bytes
        return Moves(0, 0, num_tensors, _one(), _one(), size, size, slot_base, remote_base)
    src_blocks, dst_blocks = to_block_array(request.blocks[0]), to_block_array(request.blocks[1])
    if request.chunk_bytes:
        chunk = request.chunk_bytes
        require(chunk == entry.slot_bytes, f"chunks of {chunk} bytes for remote blocks of {entry.slot_bytes}")
        require(request.batch_index < local.num_slots, f"src_batch_index {request.batch_index} of {local.num_slots}")
        check_blocks("destination", dst_blocks, entry.num_slots)
        pieces, last_bytes = split_into_blocks(local.slot_bytes, len(dst_blocks), chunk)
        return Moves(0, 0, num_tensors, pieces, dst_blocks, chunk, last_bytes, slot_base)
    require(len(src_blocks) == len(dst_blocks), f"{len(src_blocks)} source, {len(dst_blocks)} destination blocks")
    check_blocks("source", src_blocks, local.num_slots)
    check_blocks("destination", dst_blocks, entry.num_slots)
    require(
        entry.slot_bytes == local.slot_bytes,
        f"block bytes differ: local {local.slot_bytes}, remote {entry.slot_bytes}",
    )
    return Moves(0, 0, num_tensors, src_blocks, dst_blocks, local.slot_bytes, local.slot_bytes)
