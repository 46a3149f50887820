# SPDX-License-Identifier: Apache-2.0
"""Pure: a request's pulls cut into chunks that fit a staging slot. Decode side; both sides lay a chunk out alike.

In a slot the bytes of a chunk's items follow one another: tensor by tensor, and in a tensor block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.plan.layout import CacheLayout, Region, RegionRun
from vllm_ascend_pd.wire import StageItem

SLOT_BYTES = 16 << 20
GRANULE_BYTES = 16 << 10  # a block of the registered staging cache; whole ones are pulled


@dataclass(frozen=True)
class Chunk:
    """What one slot holds: `items` name the source, `dst_blocks` (as many per item) the destination."""

    items: tuple[StageItem, ...]
    dst_blocks: tuple[tuple[int, ...], ...]
    num_bytes: int

    @property
    def num_granules(self) -> int:
        """Blocks of the staging cache that hold the chunk."""
        return -(-self.num_bytes // GRANULE_BYTES)


@dataclass(frozen=True)
class Part:
    """One item's memory: `blocks` of each tensor, `block_bytes` apart, against the bytes of a slot from `offset` on."""

    tensors: tuple[int, ...]  # base addresses
    block_bytes: int
    blocks: tuple[int, ...]
    offset: int


def can_stage(layout: CacheLayout) -> bool:
    """Whether every block fits into a slot."""
    return all(region.block_bytes <= SLOT_BYTES for cache in layout.caches for region in cache)


def cut(
    pulls: Sequence[GroupPull], layout: CacheLayout, group_layers: Sequence[Sequence[str]], slot_bytes: int = SLOT_BYTES
) -> list[Chunk]:
    """Chunks in order; together they hold every (layer, block) of the pulls exactly once.

    A chunk takes all layers of some blocks. Where one block of all layers is more than a slot, the layers are divided
    first, always at the same places: a device prepares the tensors of a launch once, and then finds them prepared.
    """
    chunks: list[Chunk] = []
    items: list[StageItem] = []
    dst_blocks: list[tuple[int, ...]] = []
    used = 0
    for pull in pulls:
        for runs, block_bytes in _divide(layout.runs(group_layers[pull.group]), layout, slot_bytes):
            step = slot_bytes // block_bytes
            for first in range(0, len(pull.src_blocks), step):
                src, dst = pull.src_blocks[first : first + step], pull.dst_blocks[first : first + step]
                if used + block_bytes * len(src) > slot_bytes:
                    chunks.append(Chunk(tuple(items), tuple(dst_blocks), used))
                    items, dst_blocks, used = [], [], 0
                items += [StageItem(run.model_id, run.start, run.stop, src) for run in runs]
                dst_blocks += [dst] * len(runs)
                used += block_bytes * len(src)
    if items:
        chunks.append(Chunk(tuple(items), tuple(dst_blocks), used))
    return chunks


def _divide(runs: Sequence[RegionRun], layout: CacheLayout, slot_bytes: int) -> Iterator[tuple[list[RegionRun], int]]:
    """Sets of runs of which one block of every tensor fits into a slot, and the bytes that it takes there."""
    taken: list[RegionRun] = []
    used = 0
    for run in runs:
        size = layout.caches[run.model_id][run.start].block_bytes
        start = run.start
        while start < run.stop:
            fits = min((slot_bytes - used) // size, run.stop - start)
            if fits:
                taken.append(RegionRun(run.model_id, start, start + fits))
                start, used = start + fits, used + size * fits
            else:
                yield taken, used
                taken, used = [], 0
    if taken:
        yield taken, used


def place(items: Sequence[StageItem], blocks: Sequence[tuple[int, ...]], layout: CacheLayout) -> list[Part]:
    """Items against memory: `blocks[i]` are item i's on this side.

    Raises:
        ValueError: an item names a cache, a tensor or a block that does not exist here, the null block, or nothing.
    """
    parts: list[Part] = []
    offset = 0
    for item, ids in zip(items, blocks, strict=True):
        regions = _regions(item, layout)
        first = regions[0]
        if not ids or min(ids) <= 0 or max(ids) >= first.num_blocks:
            raise ValueError(f"blocks {ids[:4]}… of a cache of {first.num_blocks} (block 0 is never sent)")
        parts.append(Part(tuple(region.address for region in regions), first.block_bytes, ids, offset))
        offset += first.block_bytes * len(ids) * len(regions)
    return parts


def _regions(item: StageItem, layout: CacheLayout) -> tuple[Region, ...]:
    if not 0 <= item.model_id < len(layout.caches):
        raise ValueError(f"cache {item.model_id} of {len(layout.caches)}")
    cache = layout.caches[item.model_id]
    if not 0 <= item.start < item.stop <= len(cache):
        raise ValueError(f"tensors {item.start}..{item.stop} of {len(cache)}")
    return cache[item.start : item.stop]


def count_bytes(parts: Sequence[Part]) -> int:
    """Of a slot that the parts fill."""
    return sum(part.block_bytes * len(part.blocks) * len(part.tensors) for part in parts)
