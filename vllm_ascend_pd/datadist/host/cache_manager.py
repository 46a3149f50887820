# SPDX-License-Identifier: Apache-2.0
"""`CacheManager`: pull, push and local copies, with the interface's argument checks (§4); registration is its base.

Argument checks raise TypeError, ValueError or LLMException(LLM_PARAM_INVALID) before the engine is asked; the
engine's refusals are LLMException with its own code. Calls may come from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_ascend_pd.datadist.host import local
from vllm_ascend_pd.datadist.host.async_task import CacheTask, TransferJob
from vllm_ascend_pd.datadist.host.registration import CacheRegistration
from vllm_ascend_pd.datadist.host.transfers import PullRequest, PushRequest
from vllm_ascend_pd.datadist.status import (
    LLMStatusCode,
    check_int64,
    check_integer,
    check_type,
    check_uint32,
    fail,
    require,
)
from vllm_ascend_pd.datadist.transfer_types import LayerSynchronizer, MemInfo, Memtype, TransferWithCacheKeyConfig
from vllm_ascend_pd.datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    check_block_ids,
    check_layer_range,
)

Blocks = list[int] | tuple[int, ...]


class CacheManager(CacheRegistration):
    """Reached through `LLMDataDist.cache_manager`."""

    # ---- pull (§4.3)

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Blocks = (),
        dst_blocks: Blocks = (),
        **kwargs: Any,
    ) -> None:
        """Copy a peer's blocks (or a batch slot, cut into blocks) into local blocks; returns when they are there.

        Keywords: `src_layer_range`, `dst_layer_range` (range of step 1), `tensor_num_per_layer` (2).
        """
        check_type("src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey), allow_none=False)
        check_type("dst_cache", dst_cache, Cache, allow_none=False)
        src_layers, dst_layers, per_layer = _layer_arguments(kwargs)
        require(dst_cache.is_blocks_cache, "dst_cache must be a blocks cache")
        check_block_ids("src_blocks", src_blocks)
        check_block_ids("dst_blocks", dst_blocks)
        require(len(dst_blocks) > 0, "dst_blocks must not be empty")
        if isinstance(src_cache_key, BlocksCacheKey):
            require(len(src_blocks) > 0, "src_blocks must not be empty with a BlocksCacheKey")
        else:
            require(len(src_blocks) == 0, "src_blocks must be empty without a BlocksCacheKey")
        request = PullRequest(
            src_cache_key, dst_cache.cache_id, (src_blocks, dst_blocks), src_layers, dst_layers, per_layer
        )
        self._pull(request)

    def pull_cache(
        self,
        cache_key: CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copy a peer's batch slot (its first `size` bytes) into a local one. Keywords as in `pull_blocks`."""
        check_type("cache_key", cache_key, CacheKeyByIdAndIndex, allow_none=False)
        check_type("cache", cache, Cache, allow_none=False)
        require(not cache.is_blocks_cache, "cache must not be a blocks cache")
        check_uint32("batch_index", batch_index)
        check_int64("size", size)
        require(size == -1 or size > 0, f"size must be -1 or positive, not {size}")
        src_layers, dst_layers, per_layer = _layer_arguments(kwargs)
        request = PullRequest(cache_key, cache.cache_id, None, src_layers, dst_layers, per_layer, batch_index, size)
        self._pull(request)

    def _pull(self, request: PullRequest) -> None:
        with self._engine.call():
            self._engine.caches.require_held(request.cache_id)
            self._engine.pull(request)

    # ---- push (§4.5)

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Blocks = (),
        dst_blocks: Blocks = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Copy local blocks into a peer's blocks, layer by layer; not atomic."""
        check_type("dst_cache_key", dst_cache_key, BlocksCacheKey, allow_none=False)
        check_type("src_cache", src_cache, Cache, allow_none=False)
        require(src_cache.is_blocks_cache, "src_cache must be a blocks cache")
        check_block_ids("src_blocks", src_blocks)
        check_block_ids("dst_blocks", dst_blocks)
        require(len(dst_blocks) > 0, "dst_blocks must not be empty")
        self._push(
            PushRequest(
                dst_cache_key,
                src_cache.cache_id,
                (src_blocks, dst_blocks),
                src_layer_range,
                dst_layer_range,
                tensor_num_per_layer,
            )
        )

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:  # the interface has seven parameters and self
        """Copy a local batch slot into a peer's, layer by layer; not atomic."""
        check_type("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex, allow_none=False)
        check_type("src_cache", src_cache, Cache, allow_none=False)
        require(not src_cache.is_blocks_cache, "src_cache must not be a blocks cache")
        check_uint32("src_batch_index", src_batch_index)
        check_int64("size", size)
        require(size == -1, f"size must be -1, not {size}")
        self._push(
            PushRequest(
                dst_cache_key,
                src_cache.cache_id,
                None,
                src_layer_range,
                dst_layer_range,
                tensor_num_per_layer,
                src_batch_index,
            )
        )

    def _push(self, request: PushRequest) -> None:
        check_layer_range("src_layer_range", request.src_layers)
        check_layer_range("dst_layer_range", request.dst_layers)
        _check_per_layer(request.tensors_per_layer)
        self._push_one(request)

    # ---- local operations (§4.7)

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy bytes between batch slots of two local caches, the same offset on both sides."""
        check_type("dst", dst, Cache, allow_none=False)
        check_type("src", src, Cache, allow_none=False)
        require(not dst.is_blocks_cache and not src.is_blocks_cache, "copy_cache takes no blocks caches")
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        slots = dst_batch_index, src_batch_index
        check_type("offset", offset, int)
        check_type("size", size, int)
        check_type("req_id", req_id, int)
        with self._local_call(dst, src):
            local.copy_cache(self._engine.caches, dst.cache_id, src.cache_id, slots, offset, size)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Inside one local blocks cache: each source block to each of its destinations, all tensors."""
        check_type("cache", cache, Cache, allow_none=False)
        check_type("copy_block_info", copy_block_info, dict, int, allow_none=False)
        require(cache.is_blocks_cache, "copy_blocks takes a blocks cache")
        pairs = []
        for src, targets in copy_block_info.items():
            check_block_ids("copy_block_info", [src])
            check_block_ids("copy_block_info", targets)
            pairs += [(src, dst) for dst in targets]
        with self._local_call(cache):
            local.copy_blocks(self._engine.caches, cache.cache_id, pairs)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a host and a device blocks cache, either direction; by address only."""
        check_type("src_cache", src_cache, Cache, allow_none=False)
        check_type("dst_cache", dst_cache, Cache, allow_none=False)
        check_type("src_to_dst", src_to_dst, dict, int, allow_none=False)
        check_block_ids("src_to_dst", list(src_to_dst.values()))
        with self._engine.call():
            local.swap_blocks(src_cache, dst_cache, list(src_to_dst.items()))

    @contextmanager
    def _local_call(self, *caches: Cache) -> Iterator[None]:
        with self._engine.call():
            for cache in caches:
                self._engine.caches.require_held(cache.cache_id)
            yield

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Device memory repair: host memory never moves, so that only the arguments and the links are checked."""
        check_type("mem_infos", mem_infos, (MemInfo, list), MemInfo if isinstance(mem_infos, list) else None)
        infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        require(len(infos) > 0, "mem_infos must not be empty")
        for info in infos:
            require(info.mem_type == Memtype.MEM_TYPE_DEVICE, "remap_registered_memory takes device memory only")
            require(info.addr != 0 and info.size > 0, f"no memory has addr {info.addr:#x} and size {info.size}")
        with self._engine.call():
            if not self._engine.links.all():
                fail(LLMStatusCode.LLM_NOT_YET_LINK, "remap_registered_memory without a link")

    # ---- layer by layer, in the background (§4.6)

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferWithCacheKeyConfig],
        src_block_indices: Blocks | None = None,
        dst_block_indices: Blocks | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push layers as `layer_synchronizer` says that they are complete, in a thread of its own."""
        job = TransferJob(
            src_cache,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )
        job.check()
        with self._engine.call():
            return CacheTask(job, self._push_one)

    def _push_one(self, request: PushRequest) -> None:
        with self._engine.call():
            self._engine.caches.require_held(request.cache_id)
            self._engine.push(request)


def _layer_arguments(kwargs: dict[str, Any]) -> tuple[range | None, range | None, int]:
    src_layers, dst_layers = kwargs.get("src_layer_range"), kwargs.get("dst_layer_range")
    check_layer_range("src_layer_range", src_layers)
    check_layer_range("dst_layer_range", dst_layers)
    per_layer = kwargs.get("tensor_num_per_layer", 2)
    _check_per_layer(per_layer)
    return src_layers, dst_layers, per_layer


def _check_per_layer(value: int) -> None:
    check_integer("tensor_num_per_layer", value, 0, 2**32 - 1, "uint32")
    require(value > 0, "tensor_num_per_layer must be positive")
