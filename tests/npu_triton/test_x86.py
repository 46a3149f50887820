# SPDX-License-Identifier: Apache-2.0
"""The final HIVM, run on this machine: pipes with random delays, counted flags, a poisoned and bounded buffer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_triton.layout import Case, Shape, Slice, find_differences, retiled, whole
from tests.npu_triton.simulator import LOAD_PIPE, STORE_PIPE, Simulator
from tools.npu_triton import hivm_text
from tools.npu_triton.env import Environment, TritonToolError
from tools.npu_triton.lowering import ROOT, TARGETS, Job, lower
from tools.npu_triton.x86 import build_library
from vllm_ascend_pd.npu.triton_kernels import TILES

CASES = {
    "one tile": Case([whole(4, 8192)], [3]),
    "several tiles and a tail": Case([whole(6, 20000)] * 3, [5, 0, 3, 1]),
    "shorter than a tile": Case([whole(16, 77)] * 4, [15, 2, 9, 0, 4]),
    "one word more than a tile": Case([whole(4, 8193)], [1, 2]),
    "widths of MLA with an indexer": Case([whole(6, 9216), whole(6, 1152), whole(6, 257)] * 4, [4, 1, 5]),
    "heads of two sources": Case([retiled(5, 128, 128, 2)] * 4, [3, 0]),
    "heads of four sources, uneven tiles": Case([retiled(5, 150, 280, 4)] * 2, [1, 4, 2]),
    "some heads only, page-strided": Case([Shape(5, 9000, (Slice(30, 20, 200, 40),)), whole(5, 80)], [2, 4]),
}
WAITS = 4  # of each kernel: a free buffer, a filled one, and both buffers at the end


@pytest.fixture(scope="session", params=TARGETS.values())
def library(request: pytest.FixtureRequest, environment: Environment) -> Path:
    return build_library(environment, lower_for(environment, request.param))


def lower_for(environment: Environment, arch: str) -> dict[str, str]:
    return {name: lower(environment, Job(name, arch, tile.rows, tile.cols)) for name, tile in TILES.items()}


def count_steps(case: Case, suffix: str) -> int:
    """Tiles that a kernel moves, computed from what it moves."""
    tile, steps = TILES[f"pd_kv_extract{suffix}"], 0
    for shape in case.shapes:
        for part in shape.slices:
            lines = part.count if tile.rows == 1 else -(-part.count // tile.rows)
            steps += lines * -(-part.piece // tile.cols) * len(case.ids)
    return steps


@pytest.mark.parametrize("suffix", ["", "_pieces"])
@pytest.mark.parametrize("grid", [3, 40])
@pytest.mark.parametrize("name", CASES)
def test_moves_every_word_and_leaves_no_flag(library: Path, name: str, grid: int, suffix: str) -> None:
    case, simulator = CASES[name], Simulator(library, grid, suffix, delay_us=4)
    assert find_differences(case, simulator.launch) == []
    assert simulator.find_faults() == []
    for stats in simulator.stats.values():
        assert (stats.loads, stats.stores) == (count_steps(case, suffix),) * 2
        assert (stats.bytes_loaded, stats.bytes_stored) == (4 * case.staging_words,) * 2


@pytest.mark.parametrize("suffix", ["", "_pieces"])
@pytest.mark.parametrize("slow_pipe", [LOAD_PIPE, STORE_PIPE])
def test_is_right_whichever_pipe_is_slow(library: Path, slow_pipe: int, suffix: str) -> None:
    simulator = Simulator(library, 5, suffix, slow_pipe)
    assert find_differences(CASES["several tiles and a tail"], simulator.launch) == []
    assert simulator.find_faults() == []


@pytest.mark.parametrize("wait", range(WAITS))
@pytest.mark.parametrize("suffix", ["", "_pieces"])
def test_notices_a_missing_wait(environment: Environment, wait: int, suffix: str) -> None:
    modules = {
        name: hivm_text.drop_wait(text, wait)
        for name, text in lower_for(environment, TARGETS["910B"]).items()
        if name in {f"pd_kv_extract{suffix}", f"pd_kv_inject{suffix}"}
    }
    library = build_library(environment, modules)
    case, wrong = CASES["several tiles and a tail"], set()
    for slow_pipe in (LOAD_PIPE, STORE_PIPE):
        simulator = Simulator(library, 5, suffix, slow_pipe)
        wrong |= {what.partition(":")[0] for what in find_differences(case, simulator.launch)}
        assert {fault.partition(":")[0] for fault in simulator.find_faults()} == {"extract", "inject"}
    if wait < 2:  # the two in the loop protect bytes; the two at the end only leave the flags as they were
        assert wrong == {"extract", "inject"}


@pytest.mark.parametrize("kernel", TILES)
def test_knows_every_wait(environment: Environment, kernel: str) -> None:
    assert hivm_text.count_waits(lower_for(environment, TARGETS["910B"])[kernel]) == WAITS


@pytest.mark.parametrize(("address", "fault"), [(192 * 1024 - 64, "overruns"), (32772, "misaligned")])
def test_notices_a_tile_at_a_wrong_place_of_the_buffer(environment: Environment, address: int, fault: str) -> None:
    modules = lower_for(environment, TARGETS["910B"])
    moved = {name: text.replace("constant 32768 : i64", f"constant {address} : i64") for name, text in modules.items()}
    assert all(moved[name] != modules[name] for name in modules)
    simulator = Simulator(build_library(environment, moved), 5)
    find_differences(CASES["several tiles and a tail"], simulator.launch)
    assert {found.split()[-1] for found in simulator.find_faults()} == {fault}


def test_refuses_an_operation_that_it_does_not_know(environment: Environment) -> None:
    text = lower_for(environment, TARGETS["910B"])["pd_kv_extract"]
    broken = text.replace("hivm.hir.set_mask_norm", "hivm.hir.set_something")
    assert broken != text
    with pytest.raises(TritonToolError, match="set_something"):
        hivm_text.rewrite(broken, "pd_kv_extract")


def test_aborts_a_launch_with_a_fault_and_says_why(environment: Environment) -> None:
    modules = lower_for(environment, TARGETS["910B"])
    good = build_library(environment, modules)
    bad = build_library(environment, {"pd_kv_extract": hivm_text.drop_wait(modules["pd_kv_extract"], 2)})
    program = (
        "import ctypes, sys; from tests.npu_triton.simulator import pack\n"
        "zeros = (ctypes.c_int64 * 8)()\n"
        "packed = pack([ctypes.addressof(zeros)] * 3, 1, 1, int(sys.argv[2]))\n"
        "ctypes.CDLL(sys.argv[1]).pd_kv_extract(packed, ctypes.c_uint64(len(packed)), 2)\n"
    )

    def run(library: Path, grid: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(library), str(grid)]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)

    assert run(good, 2).returncode == 0
    faulty = run(bad, 2)
    assert faulty.returncode == -6
    assert "pd_kv_extract: fault; flags left 2" in faulty.stderr
    assert "pd_kv_extract: bad arguments" in run(good, 3).stderr
