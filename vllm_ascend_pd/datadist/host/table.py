# SPDX-License-Identifier: Apache-2.0
"""The caches that this process has registered or allocated, and what of them a peer gets to see.

Strict where the real engine is lenient by mistake: a blocks key is bound once, bases that are served must be
2 MiB-aligned. All methods may be called from any thread; one lock guards the tables, nothing else is taken
under it except an arena look-up. Addresses are never touched here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from vllm_ascend_pd.datadist.host.messages import CacheEntry
from vllm_ascend_pd.datadist.host.table_keys import KeyMaps, Keys, ReqKey
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import INVALID_ID, CacheDesc, CacheKey, Placement
from vllm_ascend_pd.memory.arena import Arena, find_arena
from vllm_ascend_pd.memory.mapping import ALIGNMENT
from vllm_ascend_pd.native.plane import NativePlane

logger = logging.getLogger(__name__)

_MAX_TABLE_BYTES: Final = 1 << 20  # Source: datadist-api.md §4.1
_MAX_RANK: Final = 31
_SERVED_AGAIN_S: Final = 0.002  # between two looks whether the plane still answers a peer from a cache
_FOREVER_S: Final = 3600.0


@dataclass(eq=False)
class RegisteredCache:
    """One registered cache. `users` counts copies that touch its memory now."""

    cache_id: int
    is_blocks: bool
    accessible: bool
    addresses: tuple[int, ...]
    tensor_bytes: int
    num_slots: int
    req_keys: list[ReqKey]
    arenas: list[tuple[Arena, int] | None] = field(default_factory=list)
    users: int = 0
    is_pooled: bool = False  # from a memory pool: there since `init`, so every link knows the memory
    is_dropped: bool = False  # deallocated, but a key still names it

    @property
    def num_tensors(self) -> int:
        """Tensors of the cache."""
        return len(self.addresses)

    @property
    def slot_bytes(self) -> int:
        """Distance between two blocks or batch slots."""
        return self.tensor_bytes // self.num_slots


@dataclass(frozen=True)
class Export:
    """The caches of one moment: as a peer sees them, their arenas by number, and the newest cache id."""

    entries: list[CacheEntry]
    arenas: dict[int, Arena]
    last_cache_id: int


class CacheTable:
    """Registered caches by id and by key."""

    def __init__(self, plane: NativePlane) -> None:
        self._plane = plane  # serves what is remote accessible
        self._changed = threading.Condition()  # guards everything below
        self._caches: dict[int, RegisteredCache] = {}
        self._keys = KeyMaps()
        self._next_id = 1

    def register(
        self,
        desc: CacheDesc,
        addresses: Sequence[int],
        *,
        is_blocks: bool,
        keys: Keys,
        accessible: bool | None,
        is_pooled: bool = False,
    ) -> RegisteredCache:
        """Add a cache. Raises LLMException(LLM_PARAM_INVALID)."""
        if accessible is None:
            accessible = desc.placement == Placement.DEVICE
        tensor_bytes = check_shape(desc)
        count = len(addresses)
        require(count == desc.num_tensors, f"{count} addresses for a descriptor of {desc.num_tensors} tensors")
        if accessible and not is_pooled:
            _check_addresses(desc, addresses, tensor_bytes)
        with self._changed:
            cache = RegisteredCache(
                self._next_id,
                is_blocks,
                accessible,
                tuple(addresses),
                tensor_bytes,
                desc.shape[0],
                list(keys.requests),
                is_pooled=is_pooled,
            )
            self._keys.check(keys, is_blocks)
            self._check_capacity(cache)
            if accessible:
                cache.arenas = [find_arena(address, tensor_bytes) for address in addresses]
                self._plane.add_cache(cache.cache_id, cache.addresses, tensor_bytes, accessible=True)
            self._next_id += 1
            self._caches[cache.cache_id] = cache
            self._keys.bind(cache.cache_id, keys, is_blocks)
        return cache

    def check_keys(self, keys: Keys, is_blocks: bool) -> None:
        """Raise LLMException(LLM_PARAM_INVALID) for keys that cannot be bound; before memory is taken for them."""
        with self._changed:
            self._keys.check(keys, is_blocks)

    def _check_capacity(self, added: RegisteredCache) -> None:
        size = 24
        for cache in (*self._caches.values(), added):
            if cache.accessible:
                size += 64 + 8 * cache.num_tensors + 24 * len(cache.req_keys)
        require(size <= _MAX_TABLE_BYTES, f"the cache table would take {size} bytes, at most {_MAX_TABLE_BYTES} fit")

    def unregister(self, cache_id: int, timeout_s: float) -> None:
        """Forget a registered cache once no copy touches its memory any more. Others: nothing happens."""
        with self._changed:
            cache = self._caches.get(cache_id)
            if cache is not None and not cache.is_pooled:
                self._forget(cache, timeout_s)

    def deallocate(self, cache_id: int, timeout_s: float, *, with_keys: bool) -> RegisteredCache | None:
        """Drop the reference to an allocated cache; its memory may be freed when the cache is returned.

        None: not an allocated cache, dropped already, or keys still name it (`with_keys` drops those, too).
        """
        with self._changed:
            cache = self._caches.get(cache_id)
            if cache is None or not cache.is_pooled or cache.is_dropped:
                return None
            if not with_keys and self._keys.has(cache_id):
                cache.is_dropped = True
                return None
            return self._forget(cache, timeout_s)

    def remove_key(self, key: CacheKey, timeout_s: float) -> RegisteredCache | None:
        """Forget a key of an allocated cache; returns the cache when nothing holds its memory any more."""
        with self._changed:
            cache_id = self._keys.find(key)
            cache = None if cache_id is None else self._caches[cache_id]
            if cache is None or not cache.is_pooled or cache.is_blocks:
                return None
            self._keys.remove(key)
            cache.req_keys = [kept for kept in cache.req_keys if kept[:2] != (key.req_id, key.model_id)]
            if cache.is_dropped and not self._keys.has(cache.cache_id):
                return self._forget(cache, timeout_s)
            return None

    def _forget(self, cache: RegisteredCache, timeout_s: float) -> RegisteredCache | None:
        """Holding `_changed`. None when a copy still touches the memory at the end of the timeout."""
        deadline = time.monotonic() + timeout_s
        del self._caches[cache.cache_id]
        self._keys.drop(cache.cache_id)
        is_served = not self._plane.remove_cache(cache.cache_id, 0.0)
        while (cache.users or is_served) and time.monotonic() < deadline:
            self._changed.wait(min(_SERVED_AGAIN_S if is_served else _FOREVER_S, deadline - time.monotonic()))
            is_served = not self._plane.remove_cache(cache.cache_id, 0.0)
        if cache.users or is_served:
            logger.error("cache_id=%d: a copy still touches the memory that is given up", cache.cache_id)
            return None
        return cache

    def is_gone(self, cache_id: int) -> bool:
        """Whether nobody but a peer with a key can use the cache any more."""
        with self._changed:
            cache = self._caches.get(cache_id)
            return cache is None or cache.is_dropped

    def require_held(self, cache_id: int) -> None:
        """Raise LLMException(LLM_KV_CACHE_NOT_EXIST) for a deallocated cache that only a key keeps."""
        with self._changed:
            cache = self._caches.get(cache_id)
            if cache is not None and cache.is_dropped:
                fail(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"local cache {cache_id} has been deallocated")

    @contextmanager
    def use(self, cache_id: int) -> Iterator[RegisteredCache]:
        """The cache, kept registered while in the block. Raises LLMException(LLM_KV_CACHE_NOT_EXIST)."""
        with self._changed:
            cache = self._caches.get(cache_id)
            if cache is None:
                fail(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"no local cache has cache_id {cache_id}")
            cache.users += 1
        try:
            yield cache
        finally:
            with self._changed:
                cache.users -= 1
                self._changed.notify_all()

    def export(self) -> Export:
        """What a link made now lets its peer see."""
        with self._changed:
            arenas: list[Arena] = []
            entries = [_export_one(cache, arenas) for cache in self._caches.values()]
            return Export(entries, dict(enumerate(arenas)), self._next_id - 1)


def _export_one(cache: RegisteredCache, arenas: list[Arena]) -> CacheEntry:
    """Adds to `arenas`, whose positions are the numbers on the wire."""
    ids, offsets = [], []
    for place in cache.arenas:
        if place is not None and place[0] not in arenas:
            arenas.append(place[0])
        ids.append(-1 if place is None else arenas.index(place[0]))
        offsets.append(0 if place is None else place[1])
    return CacheEntry(
        cache_id=cache.cache_id,
        is_blocks=cache.is_blocks,
        accessible=cache.accessible,
        num_tensors=cache.num_tensors,
        tensor_bytes=cache.tensor_bytes,
        num_slots=cache.num_slots,
        req_keys=cache.req_keys,
        arena_ids=ids,
        arena_offsets=offsets,
    )


def check_shape(desc: CacheDesc) -> int:
    """Bytes of one tensor. Raises LLMException(LLM_PARAM_INVALID)."""
    rank = len(desc.shape)
    require(1 <= rank <= _MAX_RANK, f"a cache has rank 1..{_MAX_RANK}, not {rank}")
    require(all(extent > 0 for extent in desc.shape), f"all extents must be positive, shape is {desc.shape}")
    require(desc.num_tensors > 0, "num_tensors must be positive")
    return desc.size


def _check_addresses(desc: CacheDesc, addresses: Sequence[int], tensor_bytes: int) -> None:
    for index, address in enumerate(addresses):
        in_range = 0 < address < 2**63 and tensor_bytes < 2**62
        require(in_range, f"tensor {index}: {address:#x} is not an address")
        if desc.placement == Placement.DEVICE:
            aligned = address % ALIGNMENT == 0
            require(aligned, f"tensor {index}: base {address:#x} is not 2 MiB-aligned")


def find_entry(entries: Sequence[CacheEntry], req_id: int, model_id: int) -> tuple[CacheEntry, int]:
    """A peer's cache and batch index by key. Raises LLMException(LLM_KV_CACHE_NOT_EXIST)."""
    found = [
        (entry, batch_index)
        for entry in entries
        for known_req_id, known_model_id, batch_index in entry.req_keys
        if (known_req_id, known_model_id) == (req_id, model_id) and (entry.is_blocks or known_req_id != INVALID_ID)
    ]
    if not found:
        name = f"model_id {model_id}" if req_id == INVALID_ID else f"req_id {req_id}, model_id {model_id}"
        fail(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"the peer had no cache of {name} when the link was made")
    return found[0]


def find_entry_by_id(entries: Sequence[CacheEntry], cache_id: int) -> CacheEntry:
    """A peer's cache by id. Raises LLMException(LLM_KV_CACHE_NOT_EXIST)."""
    found = [entry for entry in entries if entry.cache_id == cache_id]
    if not found:
        fail(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"the peer had no cache {cache_id} when the link was made")
    return found[0]
