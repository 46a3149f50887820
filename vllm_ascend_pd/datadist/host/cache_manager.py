# SPDX-License-Identifier: Apache-2.0
"""`CacheManager`: registration, pull, push and local copies, with the interface's argument checks (§4).

Argument checks raise TypeError, ValueError or LLMException(LLM_PARAM_INVALID) before the engine is asked; the
engine's refusals are LLMException with its own code. Calls may come from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from vllm_ascend_pd.datadist.host import local
from vllm_ascend_pd.datadist.host.engine import Engine
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
from vllm_ascend_pd.datadist.types import (
    INVALID_ID,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    check_layer_range,
)

Blocks = list[int] | tuple[int, ...]


class CacheManager:
    """Reached through `LLMDataDist.cache_manager`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # ---- registration (§4.1)

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register contiguous memory whose first dimension counts batch slots; key i names slot i."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("addrs", addrs, list, int)
        check_type("cache_keys", cache_keys, (list, tuple), CacheKey)
        check_type("remote_accessible", remote_accessible, bool)
        count = len(addrs)
        require(count > 0 and count == cache_desc.num_tensors, f"{count} addrs for {cache_desc.num_tensors} tensors")
        require(all(addrs), "addrs must not contain 0")
        slots = cache_desc.shape[0]
        require(len(cache_keys) <= slots, f"{len(cache_keys)} cache_keys for {slots} batch slots")
        keys = [(key.req_id, key.model_id, index) for index, key in enumerate(cache_keys)]
        return self._register(cache_desc, addrs, keys, remote_accessible, is_blocks=False)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register paged memory whose first dimension counts blocks; peers find it by the key's model_id."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("addrs", addrs, (list, tuple), int)
        check_type("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        check_type("remote_accessible", remote_accessible, bool)
        require(len(addrs) > 0, "addrs must not be empty")
        keys = [] if blocks_cache_key is None else [(INVALID_ID, blocks_cache_key.model_id, 0)]
        return self._register(cache_desc, addrs, keys, remote_accessible, is_blocks=True)

    def _register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: list[tuple[int, int, int]],
        remote_accessible: bool | None,
        *,
        is_blocks: bool,
    ) -> Cache:
        with self._register_call():
            cache = self._engine.caches.register(
                desc, addrs, is_blocks=is_blocks, req_keys=keys, accessible=remote_accessible
            )
        return Cache(cache.cache_id, desc, list(cache.addresses), is_blocks)

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a cache; unknown ids are fine. Call it only after unlinking."""
        check_int64("cache_id", cache_id)
        with self._register_call():
            self._engine.caches.unregister(cache_id, self._engine.options.sync_timeout_ms / 1000)

    @contextmanager
    def _register_call(self) -> Iterator[None]:
        if self._engine.is_closed:  # these three fail differently from the rest (§4.9)
            fail(LLMStatusCode.LLM_FAILED, "llm datadist has been finalized")
        with self._engine.call():
            yield

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
        _check_blocks("src_blocks", src_blocks)
        _check_blocks("dst_blocks", dst_blocks)
        require(len(dst_blocks) > 0, "dst_blocks must not be empty")
        if isinstance(src_cache_key, BlocksCacheKey):
            require(len(src_blocks) > 0, "src_blocks must not be empty with a BlocksCacheKey")
        else:
            require(len(src_blocks) == 0, "src_blocks must be empty without a BlocksCacheKey")
        request = PullRequest(
            src_cache_key, dst_cache.cache_id, (src_blocks, dst_blocks), src_layers, dst_layers, per_layer
        )
        with self._engine.call():
            self._engine.pull(request)

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
        with self._engine.call():
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
        _check_blocks("src_blocks", src_blocks)
        _check_blocks("dst_blocks", dst_blocks)
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
        with self._engine.call():
            self._engine.push(request)

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
        with self._engine.call():
            local.copy_cache(self._engine.caches, dst.cache_id, src.cache_id, slots, offset, size)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Inside one local blocks cache: each source block to each of its destinations, all tensors."""
        check_type("cache", cache, Cache, allow_none=False)
        check_type("copy_block_info", copy_block_info, dict, int, allow_none=False)
        require(cache.is_blocks_cache, "copy_blocks takes a blocks cache")
        pairs = []
        for src, targets in copy_block_info.items():
            _check_blocks("copy_block_info", [src])
            _check_blocks("copy_block_info", targets)
            pairs += [(src, dst) for dst in targets]
        with self._engine.call():
            local.copy_blocks(self._engine.caches, cache.cache_id, pairs)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a host and a device blocks cache, either direction; by address only."""
        check_type("src_cache", src_cache, Cache, allow_none=False)
        check_type("dst_cache", dst_cache, Cache, allow_none=False)
        check_type("src_to_dst", src_to_dst, dict, int, allow_none=False)
        _check_blocks("src_to_dst", list(src_to_dst.values()))
        with self._engine.call():
            local.swap_blocks(src_cache, dst_cache, list(src_to_dst.items()))

    # ---- not in the host implementation (docs/datadist.md)

    def allocate_cache(self, *_: Any, **__: Any) -> NoReturn:
        """Needs a memory pool."""
        _refuse("allocate_cache: memory pools")

    def allocate_blocks_cache(self, *_: Any, **__: Any) -> NoReturn:
        """Needs a memory pool."""
        _refuse("allocate_blocks_cache: memory pools")

    def deallocate_cache(self, *_: Any, **__: Any) -> NoReturn:
        """Needs a memory pool."""
        _refuse("deallocate_cache: memory pools")

    def deallocate_blocks_cache(self, *_: Any, **__: Any) -> NoReturn:
        """Needs a memory pool."""
        _refuse("deallocate_blocks_cache: memory pools")

    def remove_cache_key(self, *_: Any, **__: Any) -> NoReturn:
        """Needs a memory pool."""
        _refuse("remove_cache_key: memory pools")

    def transfer_cache_async(self, *_: Any, **__: Any) -> NoReturn:
        """Layer-wise asynchronous push."""
        _refuse("transfer_cache_async")

    def remap_registered_memory(self, *_: Any, **__: Any) -> NoReturn:
        """Device memory repair."""
        _refuse("remap_registered_memory")


def _refuse(what: str) -> NoReturn:
    fail(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, f"the host implementation has no {what}")


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


def _check_blocks(name: str, blocks: Blocks) -> None:
    """Negative ids are a TypeError: the real binding cannot turn them into uint64."""
    check_type(name, blocks, (list, tuple), int, allow_none=False)
    if blocks and min(blocks) < 0:
        raise TypeError(f"{name}: block {min(blocks)} is negative")
