# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.npu env|build|test [pytest arguments]`: the NPU data path on a machine without an NPU.

`env` makes the environment and prints its interpreter, `build` also compiles and prints the variables under which
torch_npu runs, `test` runs `tests/npu` in it. Exit status 2: something is missing here, and it is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.cache import CacheError
from tools.npu.build import ROOT, Built, build_all
from tools.npu.env import Environment, NpuBuildError, ensure_environment

NO_TESTS: Final = 5  # pytest's status when nothing was selected


def get_variables(environment: Environment, built: Built) -> dict[str, str]:
    """What a process needs to run torch_npu over the stand-in with our extension."""
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, (built.standin, environment.packages / "torch_npu/lib"))),
        "PYTHONPATH": str(ROOT),
        "VLLM_PD_NPU_EXTENSION": str(built.extension),
        "VLLM_PD_NPU_KERNEL": str(built.kernels / "pd_kv.json"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def run_tests(environment: Environment, built: Built, arguments: list[str]) -> int:
    """pytest's exit status for `tests/npu` inside the environment: the worse of two runs.

    A process can hold one build of the extension: first everything on the build that ships, then the broken twins on
    the build with defects.
    """
    command = [str(environment.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "tests/npu/pytest.ini"]
    command += ["--rootdir", "tests/npu"]
    selected, statuses = arguments or ["tests/npu"], []
    for name, folder in (("shipped", built.extension), ("defective", built.defective)):
        variables = {**os.environ, **get_variables(environment, built)}
        variables |= {"PD_TEST_NPU_BUILD": name, "VLLM_PD_NPU_EXTENSION": str(folder)}
        print(f"[npu] tests on the {name} build of the extension", flush=True)
        statuses.append(subprocess.run([*command, *selected], cwd=ROOT, env=variables, check=False).returncode)
    if not arguments:
        statuses.append(
            run_triton_kernels(environment, built, [*command, "-k", "kernel", "tests/npu/test_data_path.py"])
        )
    ran = [status for status in statuses if status != NO_TESTS]
    return max(ran, default=NO_TESTS)


def run_triton_kernels(environment: Environment, built: Built, command: list[str]) -> int:
    """The data path once more, on the Triton kernels as the real compiler lowers them, translated to this machine."""
    from tools.npu_triton.__main__ import build_object
    from tools.npu_triton.env import TritonToolError
    from tools.npu_triton.env import ensure_environment as ensure_triton_environment

    try:
        description = Path(build_object(ensure_triton_environment())).with_suffix(".json")
    except TritonToolError as error:
        raise NpuBuildError(f"the Triton kernels cannot be built here: {error}") from error
    variables = {**os.environ, **get_variables(environment, built)}
    variables |= {"PD_TEST_NPU_BUILD": "shipped", "VLLM_PD_NPU_KERNEL": str(description)}
    print(f"[npu] tests of the data path on the Triton kernels, {description}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.npu", description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("env", "build", "test"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="test: arguments for pytest")
    options = parser.parse_args()
    try:
        environment = ensure_environment()
        if options.verb == "env":
            print(environment.python)
            return 0
        built = build_all(environment)
        if options.verb == "test":
            return run_tests(environment, built, options.arguments)
    except (NpuBuildError, CacheError) as error:
        print(f"tools.npu: {error}", file=sys.stderr)
        return 2
    for name, value in get_variables(environment, built).items():
        print(f"export {name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
