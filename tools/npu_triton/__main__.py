# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.npu_triton env|lower|object|test [pytest arguments]`: the Triton kernels without an NPU.

`env` makes the environment and prints its interpreter, `lower` lowers every kernel for every chip and prints the
checks, `object` builds the library for this machine and prints its path, `test` runs `tests/npu_triton` in the
environment. Exit status 2: something is missing here, and it is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tools.cache import CacheError
from tools.npu_triton.env import Environment, TritonToolError, ensure_environment
from tools.npu_triton.lowering import ROOT, TARGETS, Job, lower
from tools.npu_triton.x86 import build_library


def get_jobs(arch: str) -> list[Job]:
    """One job per shipped kernel, with its tile."""
    from vllm_ascend_pd.npu.triton_kernels import TILES

    return [Job(name, arch, tile.rows, tile.cols) for name, tile in TILES.items()]


def lower_all(environment: Environment) -> dict[str, dict[str, str]]:
    """Final HIVM text by chip and kernel."""
    return {
        generation: {job.kernel: lower(environment, job) for job in get_jobs(arch)}
        for generation, arch in TARGETS.items()
    }


def build_object(environment: Environment) -> str:
    """The path of the library with all kernels."""
    modules = {job.kernel: lower(environment, job) for job in get_jobs(TARGETS["910B"])}
    return str(build_library(environment, modules))


def run_tests(environment: Environment, arguments: list[str]) -> int:
    """pytest's exit status for `tests/npu_triton`."""
    command = [str(environment.python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", "tests/npu_triton/pytest.ini", "--rootdir", "tests/npu_triton"]
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    command += arguments if named else [*arguments, "tests/npu_triton"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PD_TEST_NPU_TRITON": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.npu_triton", description=__doc__)
    parser.add_argument("verb", choices=("env", "lower", "object", "test"))
    args, rest = parser.parse_known_args()
    try:
        environment = ensure_environment()
        if args.verb == "env":
            print(environment.python)
        elif args.verb == "lower":
            for generation, modules in lower_all(environment).items():
                for kernel, text in modules.items():
                    print(f"{generation} {kernel}: final HIVM, {len(text.splitlines())} lines (hivmc of CANN is next)")
        elif args.verb == "object":
            print(build_object(environment))
        else:
            return run_tests(environment, rest)
    except (TritonToolError, CacheError) as error:
        print(f"npu-triton: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
