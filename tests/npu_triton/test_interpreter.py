# SPDX-License-Identifier: Apache-2.0
"""What the kernels mean: run in Triton's interpreter over ordinary memory, beside versions broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.npu_triton.lowering import KERNELS, ROOT

# name -> (text of the kernels' file, what a slip would make of it, how often the text is there)
MUTANTS = {
    "store without a mask": (", care_padding=False), mask=inside)", ", care_padding=False))", 4),
    "block number not looked up": ("tl.load(block_ids + index).to(tl.int64)", "tl.cast(index, tl.int64)", 2),
    "always the first row": ("rows + (task // num_blocks) * 8", "rows", 2),
    "distance of blocks and packed size mixed up": ("block * tl.load(row + 1)", "block * tl.load(row + 3)", 2),
    "tensors before this one forgotten": ("tl.load(row + 2) * num_blocks + ", "", 2),
    "slice's place in the packed block forgotten": (" + tl.load(row + 4)", "", 2),
    "last piece forgotten": ("count = tl.load(row + 6).to(tl.int32)", "count = tl.load(row + 6).to(tl.int32) - 1", 2),
    "pieces next to each other in the cache": ("stride = tl.load(row + 7)", "stride = tl.load(row + 5)", 2),
    "last short tile forgotten": ("steps = (piece + COLS - 1) // COLS", "steps = piece // COLS", 2),
    "last short line of tiles forgotten": ("((count + ROWS - 1) // ROWS)", "(count // ROWS)", 1),
    "lines beyond the last piece": ("((number + line) < count) & ", "", 1),
    "tasks of other programs too, but not the last": (
        "num_rows * num_blocks, tl.num",
        "num_rows * num_blocks - 1, tl.num",
        2,
    ),
    "programs stride by one too many": ("tl.num_programs(0)):", "tl.num_programs(0) + 1):", 2),
}


def run_interpreter(*paths: Path) -> list[str]:
    command = [sys.executable, "-m", "tests.npu_triton.interpreter", *map(str, paths)]
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, text=True, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, text = tmp_path_factory.mktemp("mutants"), KERNELS.read_text()
    paths = []
    for number, (name, (old, new, times)) in enumerate(MUTANTS.items()):
        assert text.count(old) == times, f"{name}: the kernels say `{old}` {text.count(old)} times"
        path = folder / f"mutant{number}.py"
        path.write_text(text.replace(old, new))
        paths.append(path)
    return dict(zip(["", *MUTANTS], run_interpreter(KERNELS, *paths), strict=True))


def test_moves_every_word_and_no_other(verdicts: dict[str, str]) -> None:
    assert verdicts[""] == ""


@pytest.mark.parametrize("name", MUTANTS)
def test_notices_a_kernel_with(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name] != ""
    assert "Error" not in verdicts[name], "the mutant does not run at all, so it shows nothing"


def test_module_imports_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import vllm_ascend_pd.npu.triton_kernels as k; print(len(k.TILES))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.stdout.strip() == "4", done.stderr
    program = program.replace("print(len(k.TILES))", "k.load_kernels()")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=False)
    assert "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr, done.stderr
