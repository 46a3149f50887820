# SPDX-License-Identifier: Apache-2.0
"""Builds and runs tests/csrc: as the product is built, cross-built, and with sanitizers.

One executable per file; it passes by exit code 0. They run one after the other, because they measure nothing but use
threads that want the cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import CacheError
from tools.native.building import ROOT, configure, configure_product, locked, run_ninja
from tools.native.emulation import find_emulation
from tools.native.toolchain import fetch_toolchain

TESTS: Final = "tests/csrc"
TIMEOUT_S: Final = 300.0
SANITIZER_OPTIONS: Final = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


@dataclass(frozen=True)
class Outcome:
    """How one executable ended. `output` is what it said."""

    name: str
    is_good: bool
    output: str
    seconds: float


def find_tests(only: Sequence[str], root: Path = ROOT) -> list[str]:
    """Names of the tests; with `only`, those that have one of these in the name.

    Raises:
        CacheError: `only` matches none.
    """
    names = sorted(path.stem for path in (root / TESTS).glob("*.cpp"))
    chosen = [name for name in names if not only or any(part in name for part in only)]
    if only and not chosen:
        raise CacheError(f"--only {' '.join(only)}: no such test in {TESTS}; there are: {', '.join(names) or 'none'}")
    return chosen


def check_product(machine: str, only: Sequence[str] = (), root: Path = ROOT) -> bool:
    """The tests with the pinned toolchain, on this machine or emulated."""
    names = find_tests(only, root)
    toolchain = fetch_toolchain()
    prefix = find_emulation(machine)
    folder = root / "build/native" / machine
    with locked(folder):
        configure_product(toolchain, machine, folder, root)
        run_ninja(toolchain, folder, [f"test_{name}" for name in names], keep_going=True)
        return run_tests(folder / "tests", names, prefix, f"{machine}{' (qemu)' if prefix else ''}")


def check_sanitized(kind: str, only: Sequence[str] = (), root: Path = ROOT) -> bool:
    """The tests with the system's g++ and a sanitizer: `address` (with undefined) or `thread`.

    Raises:
        CacheError: there is no g++.
    """
    compiler = find_system_compiler()
    names = find_tests(only, root)
    toolchain = fetch_toolchain()
    folder = root / "build/native" / kind
    values = {
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": "-O1",
        "PD_SANITIZE": kind,
    }
    with locked(folder):
        configure(toolchain, folder, values, root)
        run_ninja(toolchain, folder, [f"test_{name}" for name in names], keep_going=True)
        return run_tests(folder / "tests", names, fix_addresses(), f"{kind} sanitizer")


def find_system_compiler() -> str:
    """The g++ of this machine: zig ships no AddressSanitizer.

    Raises:
        CacheError: there is none.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise CacheError("the sanitizers come with the system's compiler, and g++ is not here: apt-get install g++")
    return compiler


def fix_addresses() -> list[str]:
    """Runs a program without address randomisation where that is allowed: TSan of older compilers needs its ranges."""
    setarch = shutil.which("setarch")
    if setarch is None or subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode != 0:
        return []
    return [setarch, "-R"]


def run_tests(folder: Path, names: Sequence[str], prefix: Sequence[str], title: str) -> bool:
    """Run executables; print one line each, what a failed one said, and the count."""
    outcomes = []
    for name in names:
        outcome = run_test(folder / name, prefix)
        outcomes.append(outcome)
        print(
            f"[native] {title}: {name}: {'ok' if outcome.is_good else 'FAILED'} in {outcome.seconds:.1f} s", flush=True
        )
        if not outcome.is_good:
            print(outcome.output, flush=True)
    num_failed = sum(not outcome.is_good for outcome in outcomes)
    print(f"[native] {title}", flush=True)
    print(f"native: {len(outcomes) - num_failed} passed, {num_failed} failed", flush=True)
    return num_failed == 0


def run_test(program: Path, prefix: Sequence[str], timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run one executable to its end or to the timeout."""
    environment = {**os.environ, **SANITIZER_OPTIONS, "PD_EMULATED": "1" if "-L" in prefix else ""}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*prefix, str(program)],
            env=environment,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
        is_good, output = done.returncode == 0, f"{done.stdout}exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        is_good, output = False, f"{said.decode(errors='replace')}still running after {timeout_s:.0f} s"
    return Outcome(program.name, is_good, output, time.monotonic() - started)
