# SPDX-License-Identifier: Apache-2.0
"""The caches that this process has registered, and what of them a peer gets to see.

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
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import INVALID_ID, CacheDesc, Placement
from vllm_ascend_pd.memory.arena import Arena, find_arena
from vllm_ascend_pd.memory.mapping import ALIGNMENT

logger = logging.getLogger(__name__)

_MAX_TABLE_BYTES: Final = 1 << 20  # Source: datadist-api.md §4.1
_MAX_RANK: Final = 31

ReqKey = tuple[int, int, int]  # (req id, model id, batch index)


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

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._caches: dict[int, RegisteredCache] = {}
        self._keys: dict[tuple[int, int], tuple[int, int]] = {}  # (req id, model id) -> (cache id, batch index)
        self._next_id = 1

    def register(
        self,
        desc: CacheDesc,
        addresses: Sequence[int],
        *,
        is_blocks: bool,
        req_keys: list[ReqKey],
        accessible: bool | None,
    ) -> RegisteredCache:
        """Add a cache. Raises LLMException(LLM_PARAM_INVALID)."""
        if accessible is None:
            accessible = desc.placement == Placement.DEVICE
        tensor_bytes = _check_shape(desc, addresses)
        if accessible:
            _check_addresses(desc, addresses, tensor_bytes)
        slots = desc.shape[0]
        with self._changed:
            cache = RegisteredCache(
                self._next_id, is_blocks, accessible, tuple(addresses), tensor_bytes, slots, list(req_keys)
            )
            self._check_keys(cache)
            self._check_capacity(cache)
            if accessible:
                cache.arenas = [find_arena(address, tensor_bytes) for address in addresses]
            self._next_id += 1
            self._caches[cache.cache_id] = cache
            for req_id, model_id, batch_index in req_keys:
                if req_id != INVALID_ID or is_blocks:
                    self._keys[req_id, model_id] = (cache.cache_id, batch_index)
        return cache

    def _check_keys(self, cache: RegisteredCache) -> None:
        seen: set[tuple[int, int]] = set()
        for req_id, model_id, _ in cache.req_keys:
            if req_id == INVALID_ID and not cache.is_blocks:
                continue  # padding: the slot has no key
            key = (req_id, model_id)
            owner = self._keys.get(key)
            what = f"model_id {model_id}" if cache.is_blocks else f"req_id {req_id}, model_id {model_id}"
            require(key not in seen, f"two keys of one cache are alike: {what}")
            require(owner is None, f"the key {what} already names cache {owner[0] if owner else 0}")
            seen.add(key)

    def _check_capacity(self, added: RegisteredCache) -> None:
        size = 24
        for cache in (*self._caches.values(), added):
            if cache.accessible:
                size += 64 + 8 * cache.num_tensors + 24 * len(cache.req_keys)
        require(size <= _MAX_TABLE_BYTES, f"the cache table would take {size} bytes, at most {_MAX_TABLE_BYTES} fit")

    def unregister(self, cache_id: int, timeout_s: float) -> None:
        """Forget a cache (unknown: nothing happens) once no copy touches its memory any more."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            cache = self._caches.pop(cache_id, None)
            if cache is None:
                return
            for key in [key for key, (owner, _) in self._keys.items() if owner == cache_id]:
                del self._keys[key]
            while cache.users and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            if cache.users:
                logger.error("cache_id=%d: a copy still touches the unregistered memory", cache_id)

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


def _check_shape(desc: CacheDesc, addresses: Sequence[int]) -> int:
    """Bytes of one tensor."""
    rank = len(desc.shape)
    require(1 <= rank <= _MAX_RANK, f"a cache has rank 1..{_MAX_RANK}, not {rank}")
    require(all(extent > 0 for extent in desc.shape), f"all extents must be positive, shape is {desc.shape}")
    count = len(addresses)
    require(
        desc.num_tensors > 0 and count == desc.num_tensors,
        f"{count} addresses for a descriptor of {desc.num_tensors} tensors",
    )
    return desc.size


def _check_addresses(desc: CacheDesc, addresses: Sequence[int], tensor_bytes: int) -> None:
    for index, address in enumerate(addresses):
        in_range = 0 < address < 2**63 and tensor_bytes < 2**63
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
