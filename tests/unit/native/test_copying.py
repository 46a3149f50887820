# SPDX-License-Identifier: Apache-2.0
"""Plans and their execution from Python: against a naive copy for random layouts, and what a plan's size depends on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.native.layouts import Case, Memory, add_case, cases, copy_naively
from vllm_ascend_pd.native.copying import (
    BlockSlice,
    CopyGroup,
    CopyGroups,
    CopyPlan,
    CopyState,
    Stores,
    crc32c,
    execute,
    kernel_name,
    make_places,
)
from vllm_ascend_pd.native.pool import CopyPool

BLOCK = 512
KERNELS = ["portable", "avx2", "avx512", "neon"]


def _tensors(count: int, num_blocks: int = 16) -> tuple[list[np.ndarray], array[int]]:
    """Random tensors, never adjacent in memory, and their addresses."""
    random = np.random.default_rng(count)
    tensors = [random.integers(0, 256, num_blocks * BLOCK + 64, np.uint8) for _ in range(count)]
    return tensors, array("Q", [tensor.ctypes.data for tensor in tensors])


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_random_layouts_are_copied_as_token_by_token(case: Case):
    src, dst = Memory(case.src, case, 1), Memory(case.dst, case, 2)
    wanted = copy_naively(case, src, dst)
    for stores in (Stores.TEMPORAL, Stores.NON_TEMPORAL):
        plan = CopyPlan()
        add_case(plan, case, src, dst)
        assert plan.num_bytes == case.num_tokens * case.num_heads * case.head_bytes * case.num_tensors
        assert execute(plan, stores=stores) is CopyState.DONE
        for index, tensor in enumerate(dst.tensors):
            np.testing.assert_array_equal(tensor, wanted[index])
            tensor[:] = Memory(case.dst, case, 2).tensors[index]


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_checksums_agree_on_both_sides_of_random_layouts(case: Case):
    src, dst = Memory(case.src, case, 3), Memory(case.dst, case, 4)
    wanted = copy_naively(case, src, dst)
    plan = CopyPlan(checksums=True)
    add_case(plan, case, src, dst)
    places = make_places(plan)
    assert execute(plan, checksums=places) is CopyState.DONE
    for tensor, expected in zip(dst.tensors, wanted, strict=True):
        np.testing.assert_array_equal(tensor, expected)
    assert places == plan.checksum_source() == plan.checksum_destination()
    assert len(places) == plan.num_pairs


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_copies_alike(kernel):
    """This file's tests of random layouts, in a process that is forced to one kernel."""
    environment = {**os.environ, "PD_COPY_KERNEL": kernel}
    code = "from vllm_ascend_pd.native.copying import kernel_name\nprint(kernel_name())"
    named = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if "but this machine has" in named.stderr:
        pytest.skip(f"this CPU has no {kernel}")
    assert named.stdout.strip() == kernel
    command = [sys.executable, "-m", "pytest", "-q", "-k", "random_layouts", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_kernel_is_one_that_is_documented():
    assert kernel_name() in KERNELS


def test_all_layers_are_one_call_and_runs_do_not_grow_with_them():
    sizes = {}
    for num_layers in (2, 64):
        _, src = _tensors(num_layers)
        _, dst = _tensors(num_layers)
        plan = CopyPlan()
        plan.add(src, dst, [3, 4, 5, 9, 10, 1], [0, 1, 2, 3, 4, 5], BLOCK)
        sizes[num_layers] = plan.num_runs, plan.num_pieces
    assert sizes == {2: (3, 6), 64: (3, 192)}


def test_records_grow_by_runs_and_not_by_blocks():
    _, tensors = _tensors(8)
    records = []
    for num_blocks in (10, 1000):
        plan = CopyPlan()
        plan.add(tensors, tensors, range(5, 5 + num_blocks), range(num_blocks, 2 * num_blocks), BLOCK)
        records.append(plan.num_runs)
    assert records == [1, 1]


@pytest.mark.parametrize("make", [list, tuple, lambda ids: array("q", ids), np.array, lambda ids: np.array(ids)[::1]])
def test_block_ids_come_in_any_form(make):
    src, src_addresses = _tensors(2)
    dst, dst_addresses = _tensors(2)
    assert CopyGroup(src_addresses, list(dst_addresses), BLOCK).copy(make([5, 2]), make([1, 7])) is CopyState.DONE
    for one, other in zip(src, dst, strict=True):
        np.testing.assert_array_equal(other[BLOCK : 2 * BLOCK], one[5 * BLOCK : 6 * BLOCK])
        np.testing.assert_array_equal(other[7 * BLOCK : 8 * BLOCK], one[2 * BLOCK : 3 * BLOCK])


def test_strided_and_narrow_ids_are_not_misread():
    src, src_addresses = _tensors(1)
    dst, dst_addresses = _tensors(1)
    group = CopyGroup(src_addresses, dst_addresses, BLOCK)
    group.copy(np.array([5, 99, 2, 99])[::2], np.array([1, 7], np.int32))
    np.testing.assert_array_equal(dst[0][BLOCK : 2 * BLOCK], src[0][5 * BLOCK : 6 * BLOCK])
    np.testing.assert_array_equal(dst[0][7 * BLOCK : 8 * BLOCK], src[0][2 * BLOCK : 3 * BLOCK])


def test_groups_of_unlike_sizes_are_copied_together():
    src, src_addresses = _tensors(4)
    dst, dst_addresses = _tensors(4)
    half = BLOCK // 2
    wide = CopyGroup(src_addresses[:2], dst_addresses[:2], BLOCK)
    both = CopyGroups([wide, CopyGroup(src_addresses[2:], dst_addresses[2:], half)])
    del wide
    gc.collect()  # the addresses belong to what was copied into the groups
    assert both.copy([5, 2], [1, 7]) is CopyState.DONE
    for index, size in enumerate([BLOCK, BLOCK, half, half]):
        for one, other in ((5, 1), (2, 7)):
            moved = dst[index][other * size : (other + 1) * size]
            np.testing.assert_array_equal(moved, src[index][one * size : (one + 1) * size])
    with pytest.raises(ValueError, match="1 source blocks and 2"):
        both.copy([1], [1, 2])


def test_extract_and_inject_are_inverse():
    caches, addresses = _tensors(6)
    before = [cache.copy() for cache in caches]
    blocks = [9, 3, 4, 5]
    staging = np.zeros(6 * 4 * BLOCK, np.uint8)
    staged = [staging.ctypes.data + index * 4 * BLOCK for index in range(6)]
    extract, inject = CopyGroup(addresses, staged, BLOCK), CopyGroup(staged, addresses, BLOCK)
    assert extract.copy(blocks, range(4)) is CopyState.DONE
    np.testing.assert_array_equal(staging[:BLOCK], caches[0][9 * BLOCK : 10 * BLOCK])
    for cache in caches:
        cache[:] = 0
    assert inject.copy(range(4), blocks) is CopyState.DONE
    for cache, old in zip(caches, before, strict=True):
        for block in range(16):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            assert (cache[part] == (old[part] if block in blocks else 0)).all()


def test_checksum_is_of_the_tensors_checksums():
    src, src_addresses = _tensors(2)
    _, dst_addresses = _tensors(2)
    plan = CopyPlan(checksums=True)
    plan.add(src_addresses, dst_addresses, [4], [5], BLOCK)
    parts = [crc32c(tensor[4 * BLOCK : 5 * BLOCK].tobytes()) for tensor in src]
    wanted = crc32c(b"".join(part.to_bytes(4, "little") for part in parts))
    assert list(plan.checksum_source()) == [wanted]


def test_crc32c_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283


def test_deadline_in_the_past_copies_nothing():
    src, src_addresses = _tensors(1)
    dst, dst_addresses = _tensors(1)
    dst[0][:] = 0
    plan = CopyPlan()
    plan.add(src_addresses, dst_addresses, [1], [1], BLOCK)
    assert execute(plan, deadline=time.monotonic() - 1) is CopyState.DEADLINE
    assert not dst[0].any()
    assert execute(plan, deadline=time.monotonic() + 60) is CopyState.DONE
    assert execute(plan, deadline=float("inf")) is CopyState.DONE


def test_wrong_arguments_name_both_values():
    _, tensors = _tensors(2)
    group = CopyGroup(tensors, tensors, BLOCK)
    with pytest.raises(ValueError, match="2 source blocks and 1 destination blocks"):
        group.copy([1, 2], [1])
    with pytest.raises(ValueError, match="2 src_blocks and 3 dst_blocks"):
        CopyPlan().add_group(group, [1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="2 source tensors and 1 destination tensors"):
        CopyGroup(tensors, tensors[:1], BLOCK)
    with pytest.raises(ValueError, match="negative block id"):
        group.copy([1], [-1])
    with pytest.raises(ValueError, match="zero bytes"):
        CopyGroup(tensors, tensors, 0).copy([1], [1])
    with pytest.raises(ValueError, match="1 places for the checksums of a plan with 0"):
        execute(CopyPlan(), checksums=array("I", [0]))


def test_slices_move_parts_of_blocks():
    src, src_addresses = _tensors(1)
    dst, dst_addresses = _tensors(1)
    before = dst[0].copy()
    slices = [BlockSlice(64, 0, 32, count=4, src_stride=128, dst_stride=32)]
    CopyGroup(src_addresses, dst_addresses, BLOCK, slices=slices).copy([2], [3])
    wanted = np.concatenate([src[0][2 * BLOCK + 64 + 128 * i :][:32] for i in range(4)])
    np.testing.assert_array_equal(dst[0][3 * BLOCK : 3 * BLOCK + 128], wanted)
    before[3 * BLOCK : 3 * BLOCK + 128] = wanted
    np.testing.assert_array_equal(dst[0], before)


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_pools_copy_random_layouts(case: Case):
    src, dst = Memory(case.src, case, 5), Memory(case.dst, case, 6)
    wanted = copy_naively(case, src, dst)
    plan = CopyPlan(checksums=True)
    add_case(plan, case, src, dst)
    job = CopyPool(1).submit(plan)
    assert job.wait() is CopyState.DONE
    for tensor, expected in zip(dst.tensors, wanted, strict=True):
        np.testing.assert_array_equal(tensor, expected)
    assert job.checksums == plan.checksum_source()
