# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries with the pinned toolchain, and keeps them in the cache under a hash of all that went in.

`build/native/<machine>` is CMake's folder and makes a change cheap; the cache makes the unchanged free, over all
checkouts. One process at a time builds in a folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tools.cache import (
    CacheError,
    compute_digest,
    compute_sha256,
    compute_tree_digest,
    get_cache_root,
    publish,
    staging,
)
from tools.native import elf
from tools.native.pins import CLANG_VERSION, CMAKE, NINJA, ZIG
from tools.native.toolchain import GLIBC, Toolchain, fetch_toolchain, get_triple, write_wrappers

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = tuple(
    f"csrc_npu/{name}" for name in ("CMakeLists.txt", "cmake", "include", "src", "host", "bind", "bench")
)
REQUIRED: Final = "libpd_host.so"
LIBRARIES: Final = (REQUIRED, "libpd_bench.so")
PLACE: Final = "vllm_ascend_pd/native"
RECIPE: Final = "1"  # raise it when this file builds something differently
KEPT_BUILDS: Final = 8


def compute_key(machine: str, root: Path = ROOT) -> str:
    """Hash of the sources, the tools and the target."""
    tools = [f"{wheel.name}=={wheel.version}" for wheel in (ZIG, CMAKE, NINJA)]
    sources = compute_tree_digest(root, (name for name in SOURCES if (root / name).exists()))
    return compute_digest(RECIPE, get_triple(machine), *tools, sources)


def build(machine: str | None = None, root: Path = ROOT) -> dict[str, Path]:
    """The libraries of a machine by name, from the cache or built now; `libpd_host.so` is always among them.

    Raises:
        CacheError: a tool cannot be had, or what came out would not load where it must.
        subprocess.CalledProcessError: the compiler's words are on the terminal.
    """
    machine = machine or platform.machine()
    for _ in range(3):  # once more where somebody edited meanwhile
        key = compute_key(machine, root)
        folder = get_folder(key)
        if is_intact(folder):
            break
        shutil.rmtree(folder, ignore_errors=True)
        built = compile_libraries(machine, root)
        if compute_key(machine, root) == key:
            _keep(built, folder)
            break
    else:
        raise CacheError(f"the sources below {root / 'csrc_npu'} change faster than they are built")
    os.utime(folder)  # the pruning below goes by last use
    return {name: folder / name for name in LIBRARIES if (folder / name).exists()}


def install(libraries: dict[str, Path], root: Path = ROOT) -> list[str]:
    """Put the running machine's libraries beside the Python that loads them; the names of those that changed.

    A library that a process has loaded is replaced, never written into.
    """
    changed = []
    for name, source in libraries.items():
        target = root / PLACE / name
        if target.exists() and compute_sha256(target) == compute_sha256(source):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=f".{name}.", dir=target.parent)
        os.close(handle)
        shutil.copyfile(source, aside)
        os.chmod(aside, 0o755)
        os.replace(aside, target)
        changed.append(name)
    return changed


def get_folder(key: str) -> Path:
    """Where a build is kept."""
    return get_cache_root() / "native" / key


def is_built(key: str) -> bool:
    """Whether `build` would have nothing to do."""
    return is_intact(get_folder(key))


def is_intact(folder: Path) -> bool:
    """Whether a kept build still has the hashes that it had."""
    try:
        recorded = json.loads((folder / "sha256.json").read_text())
        return REQUIRED in recorded and all(compute_sha256(folder / n) == digest for n, digest in recorded.items())
    except (OSError, ValueError, TypeError):
        return False


def _keep(built: dict[str, Path], final: Path) -> None:
    with staging(final.parent) as folder:
        for name, path in built.items():
            shutil.copyfile(path, folder / name)
        hashes = {name: compute_sha256(folder / name) for name in built}
        (folder / "sha256.json").write_text(json.dumps(hashes))
        publish(folder, final)
    kept = sorted((p for p in final.parent.iterdir() if not p.name.startswith(".")), key=lambda p: p.stat().st_mtime)
    for old in kept[:-KEPT_BUILDS]:
        shutil.rmtree(old, ignore_errors=True)


def compile_libraries(machine: str, root: Path = ROOT) -> dict[str, Path]:
    """Configure, compile, and check what came out; no cache."""
    toolchain = fetch_toolchain()
    folder = root / "build/native" / machine
    with locked(folder):
        configure_product(toolchain, machine, folder, root)
        has_bench = any((root / "csrc_npu/bench").glob("*.cpp"))
        run_ninja(toolchain, folder, ["pd_host", *(["pd_bench"] if has_bench else [])])
        built = {name: folder / name for name in LIBRARIES if name == REQUIRED or has_bench}
        for name, path in built.items():
            elf.check_library(name, path.read_bytes(), machine, GLIBC)
    return built


def configure_product(toolchain: Toolchain, machine: str, folder: Path, root: Path = ROOT) -> None:
    """CMake with zig for that machine."""
    wrappers = write_wrappers(toolchain, machine, folder.parent / f"wrappers-{machine}")
    values = {
        "CMAKE_TOOLCHAIN_FILE": str(root / "csrc_npu/cmake/zig.cmake"),
        "CMAKE_BUILD_TYPE": "Release",
        "PD_WRAPPERS": str(wrappers),
        "PD_TARGET_MACHINE": machine,
        "PD_CLANG_VERSION": CLANG_VERSION,
    }
    configure(toolchain, folder, values, root)


def configure(toolchain: Toolchain, folder: Path, values: dict[str, str], root: Path = ROOT) -> None:
    """Run CMake where it did not run yet with these values; ninja repeats it by itself when files come and go."""
    definitions = [
        f"-D{name}={value}" for name, value in (values | {"CMAKE_MAKE_PROGRAM": str(toolchain.ninja)}).items()
    ]
    command = [str(toolchain.cmake), "-S", str(root / "csrc_npu"), "-B", str(folder), "-G", "Ninja", *definitions]
    stamp = folder / "configured-by.txt"
    if stamp.exists() and stamp.read_text() == "\n".join(command) and (folder / "build.ninja").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_quietly(command, toolchain.environment(folder))
    stamp.write_text("\n".join(command))


def run_ninja(toolchain: Toolchain, folder: Path, targets: Sequence[str], *, keep_going: bool = False) -> None:
    """Build targets of a configured folder; no targets, no work (ninja would take that for all)."""
    if not targets:
        return
    command = [str(toolchain.ninja), "-C", str(folder), *(["-k", "0"] if keep_going else []), *targets]
    run_quietly(command, toolchain.environment(folder))


def run_quietly(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a tool; what it says is shown only if it fails."""
    done = subprocess.run(
        command,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        print(done.stdout, flush=True)
        raise subprocess.CalledProcessError(done.returncode, command)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in a build folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
