# SPDX-License-Identifier: Apache-2.0
"""Which keys name which slot of which cache: one map for request ids, one for prefix ids (§3.2).

A blocks cache is in the request map under the id that no request has. Used under the lock of `table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_ascend_pd.datadist.status import require
from vllm_ascend_pd.datadist.types import INVALID_ID, BlocksCacheKey, CacheKey

ReqKey: TypeAlias = tuple[int, int, int]  # (req id, model id, batch index)


@dataclass(frozen=True)
class Keys:
    """The keys of one cache. `requests` may hold padding (INVALID_ID) unless the cache is one of blocks."""

    requests: list[ReqKey] = field(default_factory=list)
    prefixes: list[ReqKey] = field(default_factory=list)


def split_keys(cache_keys: Sequence[CacheKey]) -> Keys:
    """Key i names slot i, by request or by prefix. Raises LLMException when one key has both."""
    keys = Keys()
    for index, key in enumerate(cache_keys):
        by_prefix = key.prefix_id != INVALID_ID
        require(not by_prefix or key.req_id == INVALID_ID, f"key {index} has a req_id and a prefix_id: {key}")
        if by_prefix:
            keys.prefixes.append((key.prefix_id, key.model_id, index))
        else:
            keys.requests.append((key.req_id, key.model_id, index))
    return keys


def blocks_keys(key: BlocksCacheKey | None) -> Keys:
    """The key of a blocks cache."""
    return Keys() if key is None else Keys([(INVALID_ID, key.model_id, 0)])


class KeyMaps:
    """(id, model id) -> (cache id, slot), in two maps."""

    def __init__(self) -> None:
        self._requests: dict[tuple[int, int], tuple[int, int]] = {}
        self._prefixes: dict[tuple[int, int], tuple[int, int]] = {}

    def check(self, keys: Keys, is_blocks: bool) -> None:
        """Raise LLMException(LLM_PARAM_INVALID) for a key that is bound already or occurs twice."""
        for what, known, wanted in (
            ("req_id", self._requests, keys.requests),
            ("prefix_id", self._prefixes, keys.prefixes),
        ):
            seen: set[tuple[int, int]] = set()
            for number, model_id, _ in wanted:
                if number == INVALID_ID and not is_blocks:
                    continue  # padding: the slot has no key
                key = (number, model_id)
                name = f"model_id {model_id}" if is_blocks else f"{what} {number}, model_id {model_id}"
                require(key not in seen, f"two keys of one cache are alike: {name}")
                require(key not in known, f"the key {name} already names cache {known.get(key, (0, 0))[0]}")
                seen.add(key)

    def bind(self, cache_id: int, keys: Keys, is_blocks: bool) -> None:
        """After `check`."""
        for known, wanted in ((self._requests, keys.requests), (self._prefixes, keys.prefixes)):
            for number, model_id, index in wanted:
                if number != INVALID_ID or is_blocks:
                    known[number, model_id] = (cache_id, index)

    def find(self, key: CacheKey) -> int | None:
        """The cache that the key names."""
        known, pair = self._select(key)
        return known[pair][0] if pair in known else None

    def remove(self, key: CacheKey) -> None:
        """Forget one key."""
        known, pair = self._select(key)
        known.pop(pair, None)

    def _select(self, key: CacheKey) -> tuple[dict[tuple[int, int], tuple[int, int]], tuple[int, int]]:
        if key.prefix_id != INVALID_ID:
            return self._prefixes, (key.prefix_id, key.model_id)
        return self._requests, (key.req_id, key.model_id)

    def drop(self, cache_id: int) -> None:
        """Forget all keys of a cache."""
        for known in (self._requests, self._prefixes):
            for pair in [pair for pair, (owner, _) in known.items() if owner == cache_id]:
                del known[pair]

    def has(self, cache_id: int) -> bool:
        """Whether any key names the cache."""
        return any(owner == cache_id for known in (self._requests, self._prefixes) for owner, _ in known.values())
