# SPDX-License-Identifier: Apache-2.0
"""The shape of an instance's KV cache: cache groups as the scheduler sees them, regions as memory holds them.

A *cache group* is a set of layers that share a block table. A *region* is the memory of one layer slot:
`num_blocks` blocks of `block_bytes`, `block_bytes` apart. Groups of a hybrid model share regions (Gemma 3: six
groups over three slots), so a region is registered once and named by its index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CacheGroup:
    """One cache group. `window` is the sliding window in tokens, 0 for full attention."""

    kind: str  # full, sliding_window, mla
    block_size: int  # tokens
    layers: tuple[str, ...]
    num_kv_heads: int  # of one rank
    head_size: int
    dtype: str
    block_bytes: int  # of one layer
    window: int = 0


def layout_record(groups: Sequence[CacheGroup]) -> list[dict[str, Any]]:
    """The handshake's description of the cache groups (JSON-able)."""
    return [asdict(group) for group in groups]


def layout_fingerprint(groups: Sequence[CacheGroup]) -> str:
    """Short hash of `layout_record`: equal exactly when the groups are."""
    text = json.dumps(layout_record(groups), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Region:
    """Memory of one layer slot, in bytes; `address` is the base of block 0."""

    address: int
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True)
class RegionRun:
    """Consecutive tensors `[start, stop)` of registered cache `model_id`."""

    model_id: int
    start: int
    stop: int


@dataclass(frozen=True)
class CacheLayout:
    """Regions in registration order, per registered cache, and where each layer lives.

    Both sides order regions by address within their own arena; equal models give equal orders, so a group's
    `runs` mean the same layers on both sides. The handshake compares the groups by name.
    """

    caches: tuple[tuple[Region, ...], ...]  # index = model_id
    slot_of_layer: Mapping[str, tuple[int, int]]  # layer -> (model_id, tensor index)

    def runs(self, layers: Sequence[str]) -> tuple[RegionRun, ...]:
        """The layers of one group as runs of consecutive tensors.

        Raises:
            KeyError: a layer has no registered region.
        """
        slots = sorted({self.slot_of_layer[layer] for layer in layers})
        runs: list[RegionRun] = []
        for model_id, index in slots:
            if runs and runs[-1].model_id == model_id and runs[-1].stop == index:
                runs[-1] = RegionRun(model_id, runs[-1].start, index + 1)
            else:
                runs.append(RegionRun(model_id, index, index + 1))
        return tuple(runs)


def build_layout(region_of_layer: Mapping[str, Region]) -> CacheLayout:
    """Group the distinct regions by block size into registered caches (one shape each), ordered by address.

    Raises:
        ValueError: two layers overlap without being the same region.
    """
    distinct = sorted(set(region_of_layer.values()), key=lambda r: r.address)
    for before, after in zip(distinct, distinct[1:], strict=False):
        if before.address + before.num_blocks * before.block_bytes > after.address:
            raise ValueError(f"KV cache regions overlap: {before} and {after}")
    shapes = sorted({(r.block_bytes, r.num_blocks) for r in distinct})
    caches = tuple(tuple(r for r in distinct if (r.block_bytes, r.num_blocks) == shape) for shape in shapes)
    slot = {region: (m, t) for m, cache in enumerate(caches) for t, region in enumerate(cache)}
    return CacheLayout(caches, {layer: slot[region] for layer, region in region_of_layer.items()})
