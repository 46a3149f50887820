# SPDX-License-Identifier: Apache-2.0
"""Regions are numbered by group, layer and part, whatever their addresses; each is registered once."""

import random
from dataclasses import replace

import pytest

from vllm_ascend_pd.plan.layout import (
    CacheGroup,
    Region,
    RegionRun,
    build_layout,
    caches_record,
    fingerprint,
    layout_fingerprint,
)

A, B, C = (Region(0x1000 * i, 4, 0x100, "bfloat16") for i in (1, 2, 3))
WIDE = Region(0x9000, 4, 0x400, "bfloat16")
GROUP = CacheGroup("mla", 32, ("l0", "l1", "l2"), 1, 576, "bfloat16", 0x140)


def make_parts(order: list[int]) -> dict[str, tuple[Region, ...]]:
    """Three layers of (nope, rope); `order` says which comes where in memory."""
    places = iter(order)
    return {
        layer: (Region(0x1000 * next(places), 4, 0x100, "int8"), Region(0x1000 * next(places), 4, 0x40, "bfloat16"))
        for layer in GROUP.layers
    }


def test_groups_that_share_regions_share_registered_tensors():
    parts = {"l0": (A,), "l1": (B,), "l2": (C,), "l3": (A,), "l4": (B,)}
    layout = build_layout(parts, [["l0", "l1", "l2"], ["l3", "l4"]])
    assert layout.caches == ((A, B, C),)
    assert layout.runs(["l0", "l1", "l2"]) == (RegionRun(0, 0, 3),)
    assert layout.runs(["l4", "l3"]) == (RegionRun(0, 0, 2),)
    assert layout.runs(["l0", "l2"]) == (RegionRun(0, 0, 1), RegionRun(0, 2, 3))


def test_unlike_block_sizes_become_caches_of_their_own_in_the_order_of_their_first_part():
    layout = build_layout({"l0": (WIDE,), "l1": (A,)}, [["l0", "l1"]])
    assert layout.caches == ((WIDE,), (A,))
    assert layout.runs(["l0", "l1"]) == (RegionRun(0, 0, 1), RegionRun(1, 0, 1))


def test_parts_of_a_layer_are_numbered_together_and_one_run_takes_them_all():
    regions = [Region(0x1000 * (i + 1), 4, 0x100) for i in range(4)]
    layout = build_layout({"l0": tuple(regions[:2]), "l1": tuple(regions[2:])}, [["l0", "l1"]])
    assert layout.slots_of_layer == {"l0": ((0, 0), (0, 1)), "l1": ((0, 2), (0, 3))}
    assert layout.runs(["l0", "l1"]) == (RegionRun(0, 0, 4),)


@pytest.mark.parametrize("seed", range(5))
def test_addresses_and_the_order_of_registration_decide_nothing(seed):
    shuffle = random.Random(seed)
    order = shuffle.sample(range(1, 7), 6)
    parts = make_parts(order)
    shuffled = {layer: parts[layer] for layer in shuffle.sample(list(parts), 3)}
    straight = build_layout(make_parts([1, 2, 3, 4, 5, 6]), [GROUP.layers])
    layout = build_layout(shuffled, [GROUP.layers])
    assert layout.slots_of_layer == straight.slots_of_layer
    assert caches_record(layout, [GROUP]) == caches_record(straight, [GROUP])
    for layer, slots in layout.slots_of_layer.items():
        assert tuple(layout.caches[model][index] for model, index in slots) == parts[layer]


def test_the_record_names_each_part_of_each_layer():
    record = caches_record(build_layout(make_parts([3, 1, 2, 5, 4, 6]), [GROUP.layers]), [GROUP])
    assert record == [
        {"kind": "mla", "layers": {f"l{i}": [[0, i, 0x100, "int8"], [1, i, 0x40, "bfloat16"]] for i in range(3)}}
    ]


def unlike_records() -> dict[str, list[object]]:
    """Of caches that must not be paired with those of `make_parts`."""
    parts = make_parts([1, 2, 3, 4, 5, 6])
    nope, rope = parts["l1"]
    swapped = replace(GROUP, layers=("l1", "l0", "l2"))
    changed = {
        "another order of layers": (parts, swapped),
        "parts the other way round": ({**parts, "l1": (rope, nope)}, GROUP),
        "one part more": ({**parts, "l1": (nope, rope, Region(0x9000, 4, 0x20))}, GROUP),
        "another block size": ({**parts, "l1": (nope, replace(rope, block_bytes=0x80))}, GROUP),
        "another element type": ({layer: (replace(p[0], dtype="bfloat16"), p[1]) for layer, p in parts.items()}, GROUP),
        "another kind": (parts, replace(GROUP, kind="full")),
        "layers that share memory": ({**parts, "l1": parts["l0"]}, GROUP),
    }
    return {why: caches_record(build_layout(p, [g.layers]), [g]) for why, (p, g) in changed.items()}


@pytest.mark.parametrize(("why", "record"), unlike_records().items(), ids=unlike_records())
def test_caches_that_are_ordered_otherwise_have_another_record(why, record):
    ours = caches_record(build_layout(make_parts([1, 2, 3, 4, 5, 6]), [GROUP.layers]), [GROUP])
    assert fingerprint(record) != fingerprint(ours), why


def test_the_number_of_blocks_is_not_part_of_the_record():
    regions = [{"l0": (replace(A, num_blocks=number),)} for number in (4, 9)]
    group = replace(GROUP, layers=("l0",))
    few, many = (caches_record(build_layout(parts, [["l0"]]), [group]) for parts in regions)
    assert few == many


def test_overlapping_regions_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        build_layout({"l0": (A,), "l1": (Region(A.address + 0x80, 4, 0x100),)}, [["l0", "l1"]])


def test_a_layer_without_memory_and_memory_without_a_group_are_refused_by_name():
    with pytest.raises(ValueError, match="layer l9 is in a cache group"):
        build_layout({"l0": (A,)}, [["l0", "l9"]])
    with pytest.raises(ValueError, match="layer l1 has a KV cache"):
        build_layout({"l0": (A,), "l1": (B,)}, [["l0"]])


def test_a_layer_without_a_group_may_share_another_layers_memory():
    layout = build_layout({"l0": (A,), "shares": (A,)}, [["l0"]])
    assert layout.slots_of_layer["shares"] == layout.slots_of_layer["l0"]
    assert layout.num_regions() == 1


def test_an_unknown_layer_is_an_error():
    with pytest.raises(KeyError):
        build_layout({"l0": (A,)}, [["l0"]]).runs(["l9"])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "full"},
        {"block_size": 64},
        {"layers": ("l1", "l0")},
        {"num_kv_heads": 4},
        {"head_size": 64},
        {"dtype": "float32"},
        {"block_bytes": 1},
        {"window": 64},
    ],
)
def test_every_field_changes_the_fingerprint(change):
    assert layout_fingerprint([GROUP]) != layout_fingerprint([replace(GROUP, **change)])
