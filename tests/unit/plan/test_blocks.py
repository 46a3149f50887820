# SPDX-License-Identifier: Apache-2.0
"""Pairs are by absolute token offset: shared blocks are never written, missing sources are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.plan.blocks import GroupPull, PlanError, plan_pulls


def test_cached_blocks_of_the_decode_side_are_not_pulled():
    pulls = plan_pulls([4], [[11, 12, 13]], [[21, 22, 23]], 4, 11)
    assert pulls == (GroupPull(0, (12, 13), (22, 23)),)


def test_blocks_outside_the_window_are_skipped_on_the_decode_side():
    pulls = plan_pulls([4, 4], [[11, 12, 13], [0, 15, 16]], [[21, 22, 23], [0, 25, 26]], 0, 11)
    assert pulls == (GroupPull(0, (11, 12, 13), (21, 22, 23)), GroupPull(1, (15, 16), (25, 26)))


def test_a_needed_block_that_prefill_did_not_keep_is_an_error_naming_the_tokens():
    with pytest.raises(PlanError, match="group 0: the prefill side kept nothing of tokens from 4"):
        plan_pulls([4], [[11, 0, 13]], [[21, 22, 23]], 0, 11)


def test_an_extra_lookahead_block_of_prefill_is_ignored():
    assert plan_pulls([4], [[11, 12, 13, 14]], [[21, 22]], 0, 8) == (GroupPull(0, (11, 12), (21, 22)),)


@pytest.mark.parametrize(
    ("src", "dst", "start", "end", "message"),
    [
        ([[11]], [[21, 22]], 0, 8, "2 blocks are needed, the handoff has 1"),
        ([[11, 12]], [[21]], 0, 8, "allocated are 1"),
        ([[11], [12]], [[21]], 0, 4, "cache groups differ: 2 in the handoff, 1 here"),
        ([[11, 12]], [[21, 22]], 3, 8, "start token 3 is inside a block of 4"),
    ],
)
def test_lists_that_do_not_fit_are_refused(src, dst, start, end, message):
    with pytest.raises(PlanError, match=message):
        plan_pulls([4], src, dst, start, end)


def test_nothing_to_move_makes_no_pull():
    assert plan_pulls([4], [[11]], [[21]], 4, 4) == ()


@given(st.integers(1, 8), st.integers(0, 6), st.integers(1, 60))
def test_every_needed_token_is_covered_exactly_once(size, cached_blocks, end):
    """For any length and cached prefix, the pairs cover [cached, end) block by block, in order."""
    start = min(cached_blocks * size, end // size * size)
    num = -(-end // size)
    src, dst = [list(range(100, 100 + num))], [list(range(200, 200 + num))]
    pulls = plan_pulls([size], src, dst, start, end)
    pairs = [p for pull in pulls for p in zip(pull.src_blocks, pull.dst_blocks, strict=True)]
    assert pairs == [(100 + i, 200 + i) for i in range(start // size, num)]


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ((), (), "0 blocks to read, 0 to write"),
        ((1, 2), (3,), "2 blocks to read, 1 to write"),
        ((1, 0), (3, 4), "null block"),
        ((1, 2), (3, 0), "null block"),
    ],
)
def test_a_pull_of_nothing_or_of_the_null_block_is_found_out(src, dst, message):
    with pytest.raises(PlanError, match=message):
        GroupPull(2, src, dst).check()
