# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.ascend_cpu env|test [pytest arguments]`: the Ascend lane's engine code on a machine without an NPU.

`env` makes the environment and prints its interpreter, `test` runs the oracle suite in it and prints how long that
took. Exit status 2: something is missing here, and it is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Final

from tools.ascend_cpu.env import LANE, Environment, environment
from tools.cache import CacheError
from tools.fork.errors import ForkError
from tools.setup_env import ROOT

SUITE: Final = ("tests/e2e", "tests/field")


def run_tests(made: Environment, arguments: list[str]) -> int:
    """pytest's exit status for the suite (or for what `arguments` select) inside the environment."""
    started = time.monotonic()
    variables = {**os.environ, "PD_TEST_LANE": LANE}
    command = [str(made.python), "-m", "pytest", "-p", "no:cacheprovider", *(arguments or SUITE)]
    status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    print(f"[{LANE}] {' '.join(arguments or SUITE)}: {time.monotonic() - started:.0f} s, exit status {status}")
    return status


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.ascend_cpu", description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("env", "test"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="test: arguments for pytest")
    options = parser.parse_args()
    try:
        with environment() as made:
            if options.verb == "test":
                return run_tests(made, options.arguments)
            print(made.python)
            return 0
    except (CacheError, ForkError) as error:
        print(f"tools.ascend_cpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
