# SPDX-License-Identifier: Apache-2.0
"""Runs kernels in Triton's interpreter: `python interpreter.py KERNELS.py...` prints one JSON list of what was wrong.

The interpreter reads and writes raw memory, so a wrong kernel may kill its process: each file gets one of its own,
forked after the slow imports. An empty string says that all cases were right.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402, F401

from tests.npu_triton.layout import Case, Shape, Slice, find_differences, retiled, whole  # noqa: E402
from tools.npu_triton.frontend import load_module  # noqa: E402

# Tiles are far smaller than the shipped ones, so that small cases have several tiles and tails in each direction.
RUNS, PIECES = (1, 256), (8, 16)
CASES = {
    "one tile": Case([whole(4, 256)], [2]),
    "tiles and a tail": Case([whole(6, 1000), whole(6, 1000), whole(6, 1000)], [5, 0, 3]),
    "shorter than a tile": Case([whole(9, 77), whole(9, 77)], [8, 2, 7, 0]),
    "widths of MLA with an indexer": Case([whole(6, 512), whole(6, 64), whole(8, 33), whole(6, 512)], [4, 1, 5]),
    "heads of two sources": Case([retiled(5, 12, 64, 2), retiled(5, 12, 64, 2)], [3, 0]),
    "heads of four sources, uneven tiles": Case([retiled(5, 21, 132, 4)], [1, 4, 2]),
    "some heads only, page-strided": Case([Shape(5, 400, (Slice(30, 20, 9, 40),)), whole(5, 80)], [2, 4]),
    "no blocks": Case([whole(3, 64)], []),
}
# One program, fewer than tasks, and more than tasks.
GRIDS = {"tiles and a tail": (1, 3, 40), "one tile": (1, 7)}


def run_cases(path: Path) -> str:
    """What was wrong with the kernels of a file in the first case that was, or nothing."""
    kernels = load_module(path).load_kernels()
    for suffix, (rows, cols) in (("", RUNS), ("_pieces", PIECES)):
        for name, case in CASES.items():
            for grid in GRIDS.get(name, (3,)):

                def launch(verb, *arguments):
                    kernels[f"pd_kv_{verb}{suffix}"][(grid,)](*arguments, ROWS=rows, COLS=cols)  # noqa: B023

                if found := find_differences(case, launch):
                    return f"{', '.join(found)}: {suffix or 'runs'}, {name}, grid {grid}"
    return ""


def run_apart(path: Path) -> str:
    """`run_cases` in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            verdict = run_cases(path)
        except BaseException as error:  # the verdict is what the parent waits for
            verdict = f"{type(error).__name__}: {error}"
        os.write(writing, (verdict or "right").encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        verdict = file.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if status != 0:
        return f"died with status {status}"
    return "" if verdict == "right" else verdict or "said nothing"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([run_apart(Path(name)) for name in sys.argv[1:]]))
