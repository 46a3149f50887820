# SPDX-License-Identifier: Apache-2.0
"""Lowers one kernel to the last HIVM that exists without CANN, and keeps it in the cache.

bishengir-compile runs every pass and then calls CANN's `hivmc`. Exactly that missing program is the success here;
any other complaint is a failure, and so is a `hivmc` that is found: then this is no machine without CANN.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import compute_digest, compute_sha256, publish, staging
from tools.npu_triton.env import Environment, TritonToolError, get_triton_root, run_tool

ROOT: Final = Path(__file__).resolve().parents[2]
KERNELS: Final = ROOT / "vllm_ascend_pd/npu/triton_kernels.py"
FRONTEND: Final = Path(__file__).with_name("frontend.py")
# generation -> the chip that is compiled for
TARGETS: Final = {"910B": "Ascend910B3", "910_93": "Ascend910_9391"}
OPTIONS: Final = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
RECIPE: Final = "1"
# What a run says that ended only because `hivmc` is not there.
_MISSING: Final = "[ERROR] Cannot find hivmc under $PATH"
_EXPECTED: Final = (
    re.escape(_MISSING),
    r"\[ERROR\] Failed to run `hivmc --version`\.",
    r"\[WARNING\] Failed to detect hivmc version for backward compatibility",
    r'loc\("[^"]*":\d+:\d+\): error: External hivmc run fails, returning module before running external compiler',
    r"\[ERROR\] Failed to run BiShengIR pipeline",
)


@dataclass(frozen=True)
class Job:
    """One kernel for one chip with one tile."""

    kernel: str
    arch: str
    rows: int
    cols: int
    source: Path = KERNELS


def check_ending(returncode: int, words: str) -> None:
    """Accept only the end that a missing `hivmc` makes.

    Raises:
        TritonToolError: the compiler's words.
    """
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    foreign = [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in _EXPECTED)]
    if foreign:
        raise TritonToolError("bishengir-compile failed:\n" + "\n".join(foreign))
    if returncode == 0 or not any(line == _MISSING for line in lines):
        raise TritonToolError(f"bishengir-compile ended with {returncode} and did not miss hivmc:\n{words}")


def lower(environment: Environment, job: Job) -> str:
    """The final HIVM text of a job, from the cache or made now.

    Raises:
        TritonToolError: the kernel does not compile; the text is the compiler's.
    """
    tools = compute_sha256(FRONTEND), compute_sha256(Path(__file__)), environment.key, RECIPE
    key = compute_digest(*tools, compute_sha256(job.source), job.kernel, job.arch, str(job.rows), str(job.cols))[:24]
    final = get_triton_root() / "hivm" / key
    if not final.exists():
        with staging(final.parent) as folder:
            made = folder / "made"
            made.mkdir()
            _compile(environment, job, made)
            publish(made, final)
    return (final / "module.hivm.opt.mlir").read_text()


def _compile(environment: Environment, job: Job, folder: Path) -> None:
    entry = folder / "kernel.mlir"
    sides = [str(job.rows), str(job.cols)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTHON"))}
    # Triton keeps its own cache: none of it may come from another version of these passes.
    variables["TRITON_CACHE_DIR"] = str(folder / "triton")
    run_tool([environment.python, FRONTEND, job.source, job.kernel, job.arch, *sides, entry], variables)
    command = [environment.bishengir / "bishengir-compile", entry, f"--target={job.arch}", *OPTIONS]
    command += [f"--save-temps={folder}", "-o", str(folder / "object")]
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, check=False, cwd=folder)
    check_ending(done.returncode, done.stdout + done.stderr)
    if not (folder / "module.hivm.opt.mlir").is_file():
        raise TritonToolError("bishengir-compile wrote no module.hivm.opt.mlir")
