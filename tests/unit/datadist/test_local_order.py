# SPDX-License-Identifier: Apache-2.0
"""Which pairs of a local copy may be one native call."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.datadist.host.local import split_by_order


@pytest.mark.parametrize(
    ("pairs", "same_memory", "parts"),
    [
        ([], True, []),
        ([(0, 1), (0, 2), (3, 4)], True, [3]),
        ([(0, 1), (1, 2)], True, [1, 1]),  # reads what was written
        ([(0, 1), (2, 0)], True, [1, 1]),  # writes what was read
        ([(0, 1), (2, 1)], True, [1, 1]),  # writes twice
        ([(0, 1), (1, 2), (2, 0)], False, [3]),
        ([(0, 1), (2, 1)], False, [1, 1]),
        ([(0, 1), (1, 2), (3, 4), (4, 5)], True, [1, 2, 1]),
    ],
)
def test_parts_hold_pairs_that_may_be_copied_in_any_order(pairs, same_memory, parts):
    split = list(split_by_order(pairs, same_memory=same_memory))
    assert [len(part) for part in split] == parts
    assert [pair for part in split for pair in part] == pairs
