# SPDX-License-Identifier: Apache-2.0
"""`CacheManager` (datadist-api.md §4). What the engine checks late is checked late here too: memory that no link can
use is accepted, and the link fails (`unusable`).
"""

from __future__ import annotations

from llm_datadist import _engine
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.utils.utils import check_isinstance
from llm_datadist.v2.llm_types import BlocksCacheKey, Cache, CacheDesc, CacheTask, Placement

_ALIGNMENT = 2 << 20
_MAX_REGIONS = 256


class CacheManager:
    """Made by `LLMDataDist`. `may_transfer` asks it whether this side may use the link to a cluster."""

    def __init__(self, inner, may_transfer):
        self._inner = inner
        self._may_transfer = may_transfer
        self._regions = {}  # cache id -> [(address, bytes)]
        self._is_linked = False
        self.unusable = ""

    def set_is_call_linked(self):
        self._is_linked = True
        self._inner.set_is_call_linked()

    # ---- registration

    def register_blocks_cache(self, cache_desc, addrs, blocks_cache_key=None, remote_accessible=None):
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        register = self._inner.register_blocks_cache
        return self._register(register, cache_desc, addrs, blocks_cache_key, remote_accessible)

    def register_cache(self, cache_desc, addrs, cache_keys=(), remote_accessible=None):
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        return self._register(self._inner.register_cache, cache_desc, addrs, cache_keys, remote_accessible)

    def _register(self, register, desc, addrs, keys, accessible):
        bad = self._find_unusable(desc, addrs, accessible)
        made = _engine.call(register, desc, addrs, keys, False if bad else accessible)
        if self._is_accessible(desc, accessible):
            self._regions[made.cache_id] = [(address, desc.size) for address in addrs]
            count = len({region for regions in self._regions.values() for region in regions})
            bad = bad or (f"{count} regions, at most {_MAX_REGIONS}" if count > _MAX_REGIONS else "")
        self.unusable = self.unusable or bad
        return Cache(made.cache_id, desc, made.tensor_addrs, made.is_blocks_cache)

    def _is_accessible(self, desc, accessible):
        if accessible is None:
            return desc.placement == Placement.DEVICE and not self._is_linked
        return accessible is True

    def _find_unusable(self, desc, addrs, accessible):
        if desc is None or desc.placement != Placement.DEVICE or not self._is_accessible(desc, accessible):
            return ""
        wrong = [address for address in addrs if isinstance(address, int) and address > 0 and address % _ALIGNMENT]
        return f"memory at {wrong[0]:#x} is not 2 MiB-aligned" if wrong else ""

    def unregister_cache(self, cache_id):
        self._regions.pop(cache_id, None)
        _engine.call(self._inner.unregister_cache, cache_id)

    # ---- pools

    def allocate_cache(self, cache_desc, cache_keys=()):
        return self._allocated(_engine.call(self._inner.allocate_cache, cache_desc, cache_keys), cache_desc)

    def allocate_blocks_cache(self, cache_desc, blocks_cache_key=None):
        made = _engine.call(self._inner.allocate_blocks_cache, cache_desc, blocks_cache_key)
        return self._allocated(made, cache_desc)

    @staticmethod
    def _allocated(made, desc):
        cache = Cache(made.cache_id, desc, made.tensor_addrs, made.is_blocks_cache)
        cache._inner = made
        return cache

    def deallocate_cache(self, cache):
        self._deallocate(self._inner.deallocate_cache, cache)

    def deallocate_blocks_cache(self, cache):
        self._deallocate(self._inner.deallocate_blocks_cache, cache)

    @staticmethod
    def _deallocate(function, cache):
        made = getattr(cache, "_inner", cache)
        _engine.call(function, made)
        if made is not cache:
            cache._given[2] = made.tensor_addrs

    def remove_cache_key(self, cache_key):
        _engine.call(self._inner.remove_cache_key, cache_key)

    # ---- transfers

    def pull_blocks(self, src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), **kwargs):
        self._check_side(src_cache_key)
        _engine.call(self._inner.pull_blocks, src_cache_key, dst_cache, src_blocks, dst_blocks, **kwargs)

    def pull_cache(self, cache_key, cache, batch_index=0, size=-1, **kwargs):
        self._check_side(cache_key)
        _engine.call(self._inner.pull_cache, cache_key, cache, batch_index, size, **kwargs)

    def push_blocks(self, dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), *args, **kwargs):
        self._check_side(dst_cache_key)
        _engine.call(self._inner.push_blocks, dst_cache_key, src_cache, src_blocks, dst_blocks, *args, **kwargs)

    def push_cache(self, dst_cache_key, src_cache, src_batch_index=0, *args, **kwargs):
        self._check_side(dst_cache_key)
        _engine.call(self._inner.push_cache, dst_cache_key, src_cache, src_batch_index, *args, **kwargs)

    def _check_side(self, key):
        cluster_id = getattr(key, "cluster_id", None)
        if cluster_id is not None and not self._may_transfer(cluster_id):
            status = LLMStatusCode.LLM_NOT_YET_LINK
            raise LLMException(f"this side has not linked to {cluster_id} ({status})", status_code=status)

    def transfer_cache_async(self, src_cache, layer_synchronizer, transfer_configs, *args, **kwargs):
        inner = _engine.call(
            self._inner.transfer_cache_async, src_cache, layer_synchronizer, transfer_configs, *args, **kwargs
        )
        return CacheTask(inner, _engine.to_status)

    # ---- inside this process

    def copy_cache(self, dst, src, *args, **kwargs):
        _engine.call(self._inner.copy_cache, dst, src, *args, **kwargs)

    def copy_blocks(self, cache, copy_block_info):
        _engine.call(self._inner.copy_blocks, cache, copy_block_info)

    def swap_blocks(self, src_cache, dst_cache, src_to_dst):
        _engine.call(self._inner.swap_blocks, src_cache, dst_cache, src_to_dst)

    def remap_registered_memory(self, mem_infos):
        _engine.call(self._inner.remap_registered_memory, mem_infos)
