# SPDX-License-Identifier: Apache-2.0
"""Which pieces a pull moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.bench.transfer.geometry import Geometry, draw_request
from vllm_ascend_pd.errors import PDConfigError

MIB = 1 << 20


@given(st.sampled_from([2 << 10, 4 << 10, 32 << 10, 256 << 10, 2 * MIB]), st.integers(0, 1 << 40), st.booleans())
def test_pieces_are_the_payload_once_inside_the_pool_and_never_overlap(piece, seed, in_order):
    geometry = Geometry(32 * MIB, 8 * MIB, 64, "sequential" if in_order else "random")
    request = draw_request(geometry, piece, seed)
    assert request.num_bytes == geometry.payload_bytes
    for offsets in (request.src_offsets, request.dst_offsets):
        assert len(set(offsets)) == len(offsets) == geometry.payload_bytes // piece
        assert min(offsets) >= 0
        assert max(offsets) <= geometry.pool_bytes - piece
        assert all(offset % piece == 0 for offset in offsets)


def test_offsets_name_the_blocks_of_every_tensor_in_order():
    geometry = Geometry(32 * MIB, 8 * MIB, 4)
    request = draw_request(geometry, 1 * MIB, 3)
    assert request.layout.num_tensors == 4
    assert len(request.src_blocks) == 2
    wanted = [tensor * 8 * MIB + block * MIB for tensor in range(4) for block in request.src_blocks]
    assert list(request.src_offsets) == wanted


def test_both_processes_draw_the_same_request():
    geometry = Geometry(32 * MIB, 8 * MIB, 64)
    assert draw_request(geometry, 4096, 5) == draw_request(geometry, 4096, 5)
    assert draw_request(geometry, 4096, 5) != draw_request(geometry, 4096, 6)


def test_tensors_stay_aligned_for_registration():
    layout = Geometry(6 * MIB, 2 * MIB, 64).layout(64 << 10)
    assert layout.tensor_bytes % (2 * MIB) == 0


@pytest.mark.parametrize(
    ("pool", "payload", "piece", "flag"),
    [(8, 8, 4096, "--pool-mib"), (9, 2, 4096, "--pool-mib"), (8, 2, 100, "--pieces")],
)
def test_sizes_that_do_not_fit_are_refused_by_flag(pool, payload, piece, flag):
    with pytest.raises(PDConfigError, match=flag):
        Geometry(pool * MIB, payload * MIB, 1).check([piece])
