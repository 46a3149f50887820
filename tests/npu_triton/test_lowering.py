# SPDX-License-Identifier: Apache-2.0
"""What triton-ascend and bishengir make of the kernels for each chip: the last text before CANN's compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.npu_triton.env import Environment, TritonToolError
from tools.npu_triton.frontend import load_module
from tools.npu_triton.lowering import KERNELS, TARGETS, Job, check_ending, lower
from vllm_ascend_pd.npu.triton_kernels import NUM_FIELDS, SIGNATURE, TILES

MISSING = "[ERROR] Cannot find hivmc under $PATH \n"
ALL = [(generation, kernel) for generation in TARGETS for kernel in TILES]
CORES = {"910B": 40, "910_93": 48}
MAX_BUFFERED = 64 * 1024


def lower_shipped(environment: Environment, generation: str, kernel: str) -> str:
    return lower(environment, Job(kernel, TARGETS[generation], TILES[kernel].rows, TILES[kernel].cols))


def get_innermost(text: str) -> str:
    """The body of the innermost loop, up to the end of the kernel."""
    return text[text.rindex("scf.for") :]


def find_slowness(text: str) -> list[str]:
    """What would make the kernel slow on hardware, as far as its text shows it."""
    found = []
    for verb in ("load_gm_to_ubuf", "store_ubuf_to_gm"):
        if (count := len(re.findall(rf"func\.call @{verb}_[12]d_int32_t\(", text))) != 1:
            found.append(f"{count} transfers of {verb}")
    if (calls := text.count("func.call @")) != 2:
        found.append(f"{calls} calls instead of the two transfers")
    if (loops := text.count("scf.for ")) != 2:
        found.append(f"{loops} loops instead of tasks and steps")
    if "memref.load" in get_innermost(text) or "memref.store" in text:
        found.append("words moved by the scalar unit")
    return found


@pytest.mark.parametrize(("generation", "kernel"), ALL)
def test_moves_a_tile_with_one_load_and_one_store(environment: Environment, generation: str, kernel: str) -> None:
    text = lower_shipped(environment, generation, kernel)
    assert find_slowness(text) == []
    assert f'"VECTOR_CORE_COUNT", {CORES[generation]} ' in text


@pytest.mark.parametrize(("generation", "kernel"), ALL)
def test_overlaps_two_tiles_within_its_share_of_the_buffer(
    environment: Environment, generation: str, kernel: str
) -> None:
    text = lower_shipped(environment, generation, kernel)
    sides = re.findall(r"pointer_cast\(%\w+\) : memref<((?:\d+x)+)i32, #hivm.address_space<ub>>", text)
    tile = TILES[kernel]
    shape = f"{tile.cols}x" if tile.rows == 1 else f"{tile.rows}x{tile.cols}x"
    assert sides == [shape, shape]  # ping and pong
    assert tile.buffered_bytes <= MAX_BUFFERED


@pytest.mark.parametrize("kernel", TILES)
def test_keeps_the_launch_arguments_in_order(environment: Environment, kernel: str) -> None:
    text = lower_shipped(environment, "910B", kernel)
    (head,) = re.findall(rf"func\.func @{kernel}\((.*?)\) attributes", text)
    types = re.findall(r"%arg\d+: (i\d+|memref<\?xi\d+)", head)
    own = {"*i64": "memref<?xi64", "*i32": "memref<?xi32", "i32": "i32"}
    assert types == ["i64", "memref<?xi8", "memref<?xi8", *(own[kind] for kind in SIGNATURE.values()), *["i32"] * 3]


@pytest.mark.parametrize("kernel", TILES)
def test_reads_each_field_of_a_row_once_and_one_block_id(environment: Environment, kernel: str) -> None:
    text = lower_shipped(environment, "910B", kernel)
    assert text.count("memref.load") == NUM_FIELDS + 1


def test_compiles_once_whatever_the_counts() -> None:
    for kernel in load_module(KERNELS).load_kernels().values():
        kept = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert kept == {"num_rows", "num_blocks"}


@pytest.mark.parametrize(("kernel", "rows", "cols"), [("pd_kv_extract", 1, 65536), ("pd_kv_inject_pieces", 1024, 64)])
@pytest.mark.parametrize("arch", TARGETS.values())
def test_refuses_a_tile_that_is_larger_than_the_buffer(
    environment: Environment, arch: str, kernel: str, rows: int, cols: int
) -> None:
    with pytest.raises(TritonToolError, match=r"ub overflow, requires 2097152 bits while 1572864 bits available"):
        lower(environment, Job(kernel, arch, rows, cols))


def test_sees_words_that_are_moved_one_by_one(environment: Environment, tmp_path: Path) -> None:
    text = KERNELS.read_text()
    changed = text.replace("+ number * stride + column + lane\n", "+ number * stride + (column + lane) * 3 % 5\n")
    assert changed != text
    path = tmp_path / "scattered.py"
    path.write_text(changed)
    lowered = lower(environment, Job("pd_kv_inject", TARGETS["910B"], 1, 8192, path))
    assert "words moved by the scalar unit" in find_slowness(lowered)


@pytest.mark.parametrize("arch", TARGETS.values())
def test_refuses_a_tile_that_leaves_no_room_for_the_next(environment: Environment, arch: str) -> None:
    with pytest.raises(TritonToolError, match="Ub overflow detected"):
        lower(environment, Job("pd_kv_extract", arch, 1, 32768))


def test_reports_a_kernel_that_does_not_compile(environment: Environment, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(KERNELS.read_text().replace("tl.program_id(0)", "tl.no_such_thing(0)"))
    with pytest.raises(TritonToolError, match="no_such_thing"):
        lower(environment, Job("pd_kv_extract", TARGETS["910B"], 1, 8192, path))


def test_accepts_only_the_missing_compiler_of_cann() -> None:
    check_ending(1, MISSING)
    check_ending(1, MISSING + "[ERROR] Failed to run BiShengIR pipeline\n")
    for returncode, words in [
        (1, ""),
        (0, ""),
        (0, MISSING),
        (1, "[ERROR] Failed to run BiShengIR pipeline\n"),
        (1, MISSING + 'loc("x.mlir":1:1): error: something else\n'),
        (1, "[ERROR] Cannot find bisheng under $PATH \n"),
    ]:
        with pytest.raises(TritonToolError):
            check_ending(returncode, words)
