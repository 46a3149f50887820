# SPDX-License-Identifier: Apache-2.0
"""The shape of an instance's KV cache: cache groups as the scheduler sees them, regions as memory holds them.

A *cache group* is a set of layers that share a block table. A layer's cache has one or more *parts* (K and V; nope
and rope; an indexer's), each in a *region* of memory: `num_blocks` blocks of `block_bytes`, `block_bytes` apart. Groups
of a hybrid model share regions (Gemma 3: six groups over three regions), so a region is registered once and named by
its index. What orders them is in docs/decisions/0008-region-order.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    return fingerprint(layout_record(groups))


@dataclass(frozen=True)
class Region:
    """Memory of one part of a layer, in bytes; `address` is the base of block 0."""

    address: int
    num_blocks: int
    block_bytes: int
    dtype: str = field(default="", compare=False)  # of the first layer that it belongs to


@dataclass(frozen=True)
class RegionRun:
    """Consecutive tensors `[start, stop)` of registered cache `model_id`."""

    model_id: int
    start: int
    stop: int


Slot = tuple[int, int]  # (model_id, tensor index)


@dataclass(frozen=True)
class CacheLayout:
    """Regions in registration order, per registered cache, and where each part of each layer lives.

    The order is that of (cache group, layer in the group, part of the layer), so it is the same on both sides however
    their memory was allocated. `caches_record` states it, and the handshake compares it.
    """

    caches: tuple[tuple[Region, ...], ...]  # index = model_id
    slots_of_layer: Mapping[str, tuple[Slot, ...]]  # layer -> its parts

    def runs(self, layers: Sequence[str]) -> tuple[RegionRun, ...]:
        """All parts of the layers as runs of consecutive tensors.

        Raises:
            KeyError: a layer has no registered region.
        """
        slots = sorted({slot for layer in layers for slot in self.slots_of_layer[layer]})
        runs: list[RegionRun] = []
        for model_id, index in slots:
            if runs and runs[-1].model_id == model_id and runs[-1].stop == index:
                runs[-1] = RegionRun(model_id, runs[-1].start, index + 1)
            else:
                runs.append(RegionRun(model_id, index, index + 1))
        return tuple(runs)

    def num_regions(self) -> int:
        """Over all caches."""
        return sum(map(len, self.caches))


def build_layout(parts_of_layer: Mapping[str, Sequence[Region]], groups: Sequence[Sequence[str]]) -> CacheLayout:
    """Number the distinct regions of the groups' layers; regions of one shape make a registered cache.

    Caches are ordered by their first region. Addresses decide nothing: on a device each tensor is an allocation of
    its own, and their addresses come in another order in every process.

    Raises:
        ValueError: two regions overlap without being the same, a group's layer has no memory, or memory belongs to no
            group.
    """
    missing = [layer for group in groups for layer in group if layer not in parts_of_layer]
    if missing:
        raise ValueError(f"layer {missing[0]} is in a cache group, but has no KV cache")
    ordered = dict.fromkeys(region for group in groups for layer in group for region in parts_of_layer[layer])
    for layer, parts in parts_of_layer.items():  # layers without a group may look at another layer's memory
        if not all(region in ordered for region in parts):
            raise ValueError(f"layer {layer} has a KV cache, but is in no cache group")
    _check_overlaps(ordered)
    by_shape: dict[tuple[int, int], list[Region]] = {}
    for region in ordered:
        by_shape.setdefault((region.block_bytes, region.num_blocks), []).append(region)
    caches = tuple(map(tuple, by_shape.values()))
    slot = {region: (m, t) for m, cache in enumerate(caches) for t, region in enumerate(cache)}
    return CacheLayout(caches, {layer: tuple(slot[part] for part in parts) for layer, parts in parts_of_layer.items()})


def _check_overlaps(regions: Iterable[Region]) -> None:
    by_address = sorted(regions, key=lambda region: region.address)
    for before, after in zip(by_address, by_address[1:], strict=False):
        if before.address + before.num_blocks * before.block_bytes > after.address:
            raise ValueError(f"KV cache regions overlap: {before} and {after}")


def caches_record(layout: CacheLayout, groups: Sequence[CacheGroup]) -> list[dict[str, Any]]:
    """What must be equal on both sides for a pull by (cache, tensor, block) to pair the same layers (JSON-able).

    Per group and layer its parts: registered cache, tensor in it, bytes of a block, element type.
    """

    def describe(slot: Slot) -> list[Any]:
        region = layout.caches[slot[0]][slot[1]]
        return [*slot, region.block_bytes, region.dtype]

    return [
        {
            "kind": group.kind,
            "layers": {layer: list(map(describe, layout.slots_of_layer[layer])) for layer in group.layers},
        }
        for group in groups
    ]


def fingerprint(record: Any) -> str:
    """Short hash of something JSON-able."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=list).encode()).hexdigest()[:16]
