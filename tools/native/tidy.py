# SPDX-License-Identifier: Apache-2.0
"""clang-tidy over csrc_npu and tests/csrc with zig's own headers: needs no compiler on the machine.

A file that was clean is not looked at again until it, a header, the configuration or the tool changes. A file with code
for aarch64 alone is looked at once for each machine.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tools.cache import CacheError, compute_digest, compute_sha256, get_cache_root
from tools.native.building import ROOT, SOURCES
from tools.native.pins import CLANG_TIDY, ZIG
from tools.native.testing import TESTS
from tools.native.toolchain import Toolchain, fetch_tool, fetch_toolchain, find_program, get_triple

INCLUDES: Final = ("csrc_npu/include", "csrc_npu", TESTS)
_FOREIGN: Final = re.compile(r"__aarch64__|arm_neon|arm_acle")


def tidy(only: Sequence[str] = (), root: Path = ROOT) -> bool:
    """Look at every file that is not known to be clean; print what is found."""
    jobs = [(path, machine) for path in list_files(only, root) for machine in choose_machines(path)]
    headers = compute_headers_digest(root)
    keys = [
        compute_digest(headers, machine, str(path.relative_to(root)), compute_sha256(path)) for path, machine in jobs
    ]
    clean = get_cache_root() / "tidy"
    todo = [(*job, clean / key) for job, key in zip(jobs, keys, strict=True) if not (clean / key).exists()]
    if not todo:
        print(f"[native] clang-tidy: {len(jobs)} files are clean, as before")
        return True
    toolchain = fetch_toolchain()
    program = find_program(fetch_tool(CLANG_TIDY), "clang-tidy")
    flags = {machine: read_system_flags(toolchain, machine, root) for machine in {job[1] for job in todo}}
    clean.mkdir(parents=True, exist_ok=True)

    def examine(job: tuple[Path, str, Path]) -> str:
        path, machine, mark = job
        found = run_clang_tidy(program, path, flags[machine], root)
        if found:
            print(found, flush=True)
        else:
            mark.touch()
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = [found for found in pool.map(examine, todo) if found]
    print(f"[native] clang-tidy: {len(todo)} files, {len(findings)} with findings", flush=True)
    return not findings


def list_files(only: Sequence[str], root: Path) -> list[Path]:
    """The sources; with `only`, those that have one of these in the path."""
    found = [path for name in (*SOURCES, TESTS) for path in sorted((root / name).rglob("*.cpp"))]
    return [path for path in found if not only or any(part in str(path.relative_to(root)) for part in only)]


def choose_machines(path: Path) -> list[str]:
    """Which machines' view of a file is looked at."""
    return ["x86_64", "aarch64"] if _FOREIGN.search(path.read_text()) else ["x86_64"]


def compute_headers_digest(root: Path) -> str:
    """Hash of what a finding depends on beside the file itself."""
    headers = sorted({path for name in INCLUDES for path in (root / name).rglob("*.h")})
    parts = [f"{path.relative_to(root)}={compute_sha256(path)}" for path in [*headers, root / ".clang-tidy"]]
    return compute_digest(CLANG_TIDY.version, ZIG.version, *parts)


def read_system_flags(toolchain: Toolchain, machine: str, root: Path) -> list[str]:
    """Where zig's clang finds the standard headers of a target, by asking it."""
    build = root / "build/native"
    build.mkdir(parents=True, exist_ok=True)
    probe = build / f"probe-{machine}-{os.getpid()}.cpp"
    probe.write_text(f"// {os.getpid()}\nint probe;\n")
    command = [str(toolchain.zig), "c++", "-target", get_triple(machine), "-c", str(probe), "-o", os.devnull]
    environment = {**toolchain.environment(build), "ZIG_VERBOSE_CC": "1", "ZIG_LOCAL_CACHE_DIR": str(build / "probe")}
    try:
        done = subprocess.run(command, cwd=build, env=environment, text=True, capture_output=True, check=False)
    finally:
        probe.unlink()
        probe.with_suffix(".o").unlink(missing_ok=True)  # zig puts it into the working directory all the same
    return parse_system_flags(done.stderr)


def parse_system_flags(text: str) -> list[str]:
    """`-nostdinc`, `-isystem`, `-D` and the target out of the command line that zig prints."""
    words = next((line.split() for line in text.splitlines() if " clang " in line), [])
    kept: list[str] = []
    for word, following in zip(words, words[1:], strict=False):
        if word in ("-isystem", "-target"):
            kept += [word, following]
        elif word.startswith(("-D_", "-nostdinc")):
            kept.append(word)
    if "-isystem" not in kept:
        raise CacheError(f"zig did not say where its headers are:\n{text}")
    return kept


def run_clang_tidy(program: Path, path: Path, flags: Sequence[str], root: Path) -> str:
    """The findings in one file; empty when it is clean."""
    options = ["-x", "c++", "-std=c++20", "-Wall", "-Wextra", "-pthread", *flags]
    options += [f"-I{root / name}" for name in INCLUDES]
    command = [str(program), "--quiet", f"--config-file={root / '.clang-tidy'}", str(path), "--", *options]
    done = subprocess.run(command, cwd=root, text=True, errors="replace", capture_output=True, check=False)
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or done.stderr.strip() or f"{path}: clang-tidy ended with {done.returncode}"
