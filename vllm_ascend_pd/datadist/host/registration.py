# SPDX-License-Identifier: Apache-2.0
"""The half of `CacheManager` that makes and forgets caches: registered memory, and memory from pools (§4.1, §4.2).

Python-side checks raise TypeError, ValueError or LLMException(LLM_PARAM_INVALID) first. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vllm_ascend_pd.datadist.host.engine import Engine
from vllm_ascend_pd.datadist.host.pools import MemoryPool, Pools
from vllm_ascend_pd.datadist.host.table import RegisteredCache, check_shape
from vllm_ascend_pd.datadist.host.table_keys import Keys, blocks_keys, split_keys
from vllm_ascend_pd.datadist.status import LLMStatusCode, check_int64, check_type, fail, require
from vllm_ascend_pd.datadist.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, Placement


class CacheRegistration:
    """Part of CacheManager."""

    def __init__(self, engine: Engine, pools: Pools) -> None:
        self._engine = engine
        self._pools = pools
        self._is_linked = False  # a two-sided link has been made: memory cannot be made accessible any more

    def set_is_call_linked(self) -> None:
        """From a two-sided `link` on, nothing is registered for remote access (§1.3)."""
        self._is_linked = True

    # ---- registered memory (§4.1)

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
        keys = _slot_keys(cache_desc, cache_keys)
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
        return self._register(cache_desc, addrs, blocks_keys(blocks_cache_key), remote_accessible, is_blocks=True)

    def _register(
        self, desc: CacheDesc, addrs: Sequence[int], keys: Keys, remote_accessible: bool | None, *, is_blocks: bool
    ) -> Cache:
        if self._is_linked:
            require(remote_accessible is not True, "remote_accessible must not be True after a two-sided link")
            remote_accessible = False
        with self._owner_call():
            cache = self._engine.caches.register(
                desc, addrs, is_blocks=is_blocks, keys=keys, accessible=remote_accessible
            )
        return Cache(cache.cache_id, desc, list(cache.addresses), is_blocks)

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a registered cache; unknown ids are fine. Call it only after unlinking."""
        check_int64("cache_id", cache_id)
        with self._owner_call():
            self._engine.caches.unregister(cache_id, self._timeout_s)

    # ---- memory from pools (§4.2)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Batch slots in pool memory; key i names slot i, and keeps the memory until `remove_cache_key`."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("cache_keys", cache_keys, (list, tuple), CacheKey)
        pool = self._get_pool(cache_desc)
        return self._allocate(pool, cache_desc, _slot_keys(cache_desc, cache_keys), is_blocks=False)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Blocks in pool memory."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        pool = self._get_pool(cache_desc)
        return self._allocate(pool, cache_desc, blocks_keys(blocks_cache_key), is_blocks=True)

    def _get_pool(self, desc: CacheDesc) -> MemoryPool:
        require(desc.num_tensors > 0, "num_tensors must be positive")
        pool = self._pools.get(desc.placement)
        option = "mem_pool_cfg" if desc.placement == Placement.DEVICE else "host_mem_pool_cfg"
        if pool is None:
            fail(LLMStatusCode.LLM_PARAM_INVALID, f"you should configure a memory pool first: {option}")
        return pool

    def _allocate(self, pool: MemoryPool, desc: CacheDesc, keys: Keys, *, is_blocks: bool) -> Cache:
        with self._owner_call():
            caches = self._engine.caches
            tensor_bytes = check_shape(desc)
            caches.check_keys(keys, is_blocks)
            addresses = pool.allocate(tensor_bytes, desc.num_tensors)
            try:
                cache = caches.register(
                    desc, addresses, is_blocks=is_blocks, keys=keys, accessible=None, is_pooled=True
                )
            except BaseException:  # bound meanwhile by another thread, or the table is full
                pool.free(addresses)
                raise
        return Cache(cache.cache_id, desc, addresses, is_blocks)

    def deallocate_cache(self, cache: Cache) -> None:
        """Drop the reference; the memory is free once no key names the cache. Others than allocated: nothing."""
        check_type("cache", cache, Cache)
        require(not cache.is_blocks_cache, "deallocate_cache takes no blocks cache")
        self._deallocate(cache, with_keys=False)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Free the memory and forget its key. Others than allocated: nothing."""
        check_type("cache", cache, Cache)
        require(cache.is_blocks_cache, "deallocate_blocks_cache takes a blocks cache")
        self._deallocate(cache, with_keys=True)

    def _deallocate(self, cache: Cache, *, with_keys: bool) -> None:
        with self._engine.call():
            self._free(self._engine.caches.deallocate(cache.cache_id, self._timeout_s, with_keys=with_keys))
        if self._engine.caches.is_gone(cache.cache_id):
            cache.tensor_addrs = []

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget the key of an allocated cache; other keys: nothing happens."""
        check_type("cache_key", cache_key, CacheKey, allow_none=False)
        with self._engine.call():
            if not self._pools.exist:
                fail(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "remove_cache_key needs a memory pool")
            self._free(self._engine.caches.remove_key(cache_key, self._timeout_s))

    def _free(self, cache: RegisteredCache | None) -> None:
        if cache is not None:
            self._pools.free(list(cache.addresses))

    # ----

    @property
    def _timeout_s(self) -> float:
        return self._engine.options.sync_timeout_ms / 1000

    @contextmanager
    def _owner_call(self) -> Iterator[None]:
        if self._engine.is_closed:  # register, allocate and unregister fail differently from the rest (§4.9)
            fail(LLMStatusCode.LLM_FAILED, "llm datadist has been finalized")
        with self._engine.call():
            yield


def _slot_keys(desc: CacheDesc, cache_keys: Sequence[CacheKey]) -> Keys:
    slots = desc.shape[0]
    require(len(cache_keys) <= slots, f"{len(cache_keys)} cache_keys for {slots} batch slots")
    return split_keys(cache_keys)
