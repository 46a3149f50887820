# SPDX-License-Identifier: Apache-2.0
"""Chunks of staged transfers: every (tensor, block) exactly once, none larger than a slot, both sides alike."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.plan.layout import CacheLayout, Region, build_layout
from vllm_ascend_pd.transfer.staging.chunks import can_stage, count_bytes, cut, place
from vllm_ascend_pd.wire import StageItem

NUM_BLOCKS = 50


def make_layout(shapes: list[int]) -> CacheLayout:
    """One region per entry, with blocks of that many bytes."""
    regions, address = {}, 1 << 21
    for index, block_bytes in enumerate(shapes):
        regions[f"l{index}"] = (Region(address, NUM_BLOCKS, block_bytes),)
        address += NUM_BLOCKS * block_bytes + 64
    return build_layout(regions, [list(regions)])


def expand(item: StageItem, dst_blocks: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [
        (item.model_id, tensor, src, dst)
        for tensor in range(item.start, item.stop)
        for src, dst in zip(item.blocks, dst_blocks, strict=True)
    ]


@given(
    shapes=st.lists(st.sampled_from([64, 96, 1024]), min_size=1, max_size=9),
    num_blocks=st.integers(1, 30),
    slot_bytes=st.integers(1024, 40_000),
    data=st.data(),
)
def test_chunks_hold_every_pair_once_and_fit_their_slot(shapes, num_blocks, slot_bytes, data):
    layout = make_layout(shapes)
    layers = [f"l{i}" for i in range(len(shapes))]
    split = data.draw(st.integers(0, len(layers)))
    groups = [g for g in (layers[:split], layers[split:]) if g]
    pulls = [
        GroupPull(
            index,
            tuple(data.draw(st.permutations(range(1, NUM_BLOCKS)))[:num_blocks]),
            tuple(data.draw(st.permutations(range(1, NUM_BLOCKS)))[:num_blocks]),
        )
        for index in range(len(groups))
    ]
    chunks = cut(pulls, layout, groups, slot_bytes)
    moved = Counter(
        pair
        for chunk in chunks
        for item, dst in zip(chunk.items, chunk.dst_blocks, strict=True)
        for pair in expand(item, dst)
    )
    wanted = Counter(
        (*slot, src, dst)
        for pull in pulls
        for layer in groups[pull.group]
        for slot in layout.slots_of_layer[layer]
        for src, dst in zip(pull.src_blocks, pull.dst_blocks, strict=True)
    )
    assert moved == wanted
    for chunk in chunks:
        parts = place(chunk.items, [item.blocks for item in chunk.items], layout)
        assert chunk.num_bytes == count_bytes(parts) <= slot_bytes
        ends = [part.offset + part.block_bytes * len(part.blocks) * len(part.tensors) for part in parts]
        assert [part.offset for part in parts] == [0, *ends[:-1]]


def test_few_chunks_are_made_of_many_small_layers():
    """24 layers of one 4 KiB block are one chunk, not 24."""
    layout = make_layout([4096] * 24)
    (chunk,) = cut([GroupPull(0, (3,), (4,))], layout, [[f"l{i}" for i in range(24)]])
    assert (len(chunk.items), chunk.num_bytes, chunk.num_granules) == (1, 24 * 4096, 6)


@pytest.mark.parametrize(
    "item",
    [
        StageItem(1, 0, 1, (1,)),
        StageItem(0, 0, 3, (1,)),
        StageItem(0, 1, 1, (1,)),
        StageItem(0, -1, 1, (1,)),
        StageItem(0, 0, 1, ()),
        StageItem(0, 0, 1, (0,)),
        StageItem(0, 0, 1, (NUM_BLOCKS,)),
        StageItem(0, 0, 1, (1, -1)),
    ],
)
def test_what_does_not_exist_here_is_refused(item: StageItem):
    with pytest.raises(ValueError, match="cache|tensors|blocks"):
        place([item], [item.blocks], make_layout([64, 64]))


def test_a_block_larger_than_a_slot_cannot_be_staged():
    assert can_stage(make_layout([1024]))
    assert not can_stage(make_layout([1024, 17 << 20]))


@pytest.mark.parametrize(("block_bytes", "num_sets"), [(64, 1), (1024, 2)])
def test_a_large_transfer_takes_the_same_few_sets_of_tensors_again_and_again(block_bytes: int, num_sets: int):
    """A device prepares the tensors of a launch: 48 blocks of 24 layers through slots of 16 KiB."""
    layout = make_layout([block_bytes] * 24)
    blocks = tuple(range(1, 49))
    chunks = cut([GroupPull(0, blocks, blocks)], layout, [[f"l{i}" for i in range(24)]], 16 << 10)
    assert len({tuple((i.model_id, i.start, i.stop) for i in chunk.items) for chunk in chunks}) == num_sets
    assert all(chunk.num_bytes <= 16 << 10 for chunk in chunks)
