# SPDX-License-Identifier: Apache-2.0
"""Regions are registered once, groups of a hybrid model map onto them by layer name."""

from dataclasses import replace

import pytest

from vllm_ascend_pd.plan.layout import CacheGroup, Region, RegionRun, build_layout, layout_fingerprint

A, B, C = (Region(0x1000 * i, 4, 0x100) for i in (1, 2, 3))
WIDE = Region(0x9000, 4, 0x400)


def test_groups_that_share_slots_share_registered_regions():
    layout = build_layout({"l0": A, "l1": B, "l2": C, "l3": A, "l4": B})
    assert layout.caches == ((A, B, C),)
    assert layout.runs(["l0", "l1", "l2"]) == (RegionRun(0, 0, 3),)
    assert layout.runs(["l4", "l3"]) == (RegionRun(0, 0, 2),)
    assert layout.runs(["l0", "l2"]) == (RegionRun(0, 0, 1), RegionRun(0, 2, 3))


def test_unlike_block_sizes_become_caches_of_their_own():
    layout = build_layout({"l0": A, "l1": WIDE})
    assert layout.caches == ((A,), (WIDE,))
    assert layout.runs(["l0", "l1"]) == (RegionRun(0, 0, 1), RegionRun(1, 0, 1))


def test_overlapping_regions_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        build_layout({"l0": A, "l1": Region(A.address + 0x80, 4, 0x100)})


def test_an_unknown_layer_is_an_error():
    with pytest.raises(KeyError):
        build_layout({"l0": A}).runs(["l9"])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "mla"},
        {"block_size": 64},
        {"layers": ("l1", "l0")},
        {"num_kv_heads": 4},
        {"head_size": 64},
        {"dtype": "bfloat16"},
        {"block_bytes": 1},
        {"window": 64},
    ],
)
def test_every_field_changes_the_fingerprint(change):
    group = CacheGroup("full", 32, ("l0", "l1"), 2, 32, "float32", 0x100)
    assert layout_fingerprint([group]) != layout_fingerprint([replace(group, **change)])
