# SPDX-License-Identifier: Apache-2.0
"""The environment of triton-ascend and the LLVM tools beside it, both in the cache folder under a hash.

triton-ascend installs itself as `triton` and needs an older numpy, so it must never lie in `.venv`. The wheels that
decide what is tested are pinned by hash, and so are Debian's packages, which are unpacked and not installed.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import (
    CacheError,
    PinnedWheel,
    compute_digest,
    compute_sha256,
    fetch_wheels,
    get_cache_root,
    publish,
    staging,
)
from tools.installer import find_installer

WHEELS: Final = (
    PinnedWheel("triton-ascend", "3.2.0", ("17c8d7161eed1e96a286281963fe04d3113ee85affaa5d82c7dd0c35803962f0",)),
    PinnedWheel("ascendnpu-ir", "1.2.0", ("d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",)),
    PinnedWheel("pybind11", "3.1.0", ("b8488090f8acffbcb6b5d6a85571a6827a0a2981ffb75e5a0b27b87c4a6b7dd0",)),
    PinnedWheel("pytest", "9.2.0", ("07acdcf88ec174f907dc01af70bf52d49b014bbab03faeeade31c96b18c2e588",)),
    PinnedWheel("numpy", "2.3.5", ("8cba086a43d54ca804ce711b2a940b16e452807acebe7852ff327f1ecd49b0d4",)),
)
REQUIREMENTS: Final = ("torch==2.13.0", "numpy==2.3.5", "iniconfig", "packaging", "pluggy>=1.5,<2", "pygments>=2.7.2")
# Debian 12's LLVM is the release that bishengir's text is read by.
DEBIAN_VERSION: Final = "1:19.1.7-3~deb12u1"
PACKAGES: Final = {
    "mlir-19-tools": "d4ab4c6f869dc441768fc93b2886fc5ad9d13ee016018d1e7dc9e86481e410cb",
    "libmlir-19": "d1861f4b83c978fb55582d95dc76d56b2cee052297676003cb3ddb579982bd0a",
    "llvm-19": "f91492c5b361ff12f540b9f6145cf638b5e0fb3f145fceabd6c4b9540eab4bf9",
    "libllvm19": "6edf3a8b28495cdba883d9760e0dca1a81983fc497a5f989dc64d0d96d23b4aa",
}
PROGRAMS: Final = ("mlir-translate", "llc")
RECIPE: Final = "1"  # raise it when this file makes something differently


class TritonToolError(Exception):
    """Something cannot be made or run here; the text says what, and what to do."""


@dataclass(frozen=True)
class Environment:
    """A finished environment with its tools."""

    folder: Path
    llvm: Path
    key: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def bishengir(self) -> Path:
        """The folder with bishengir-compile and bishengir-opt."""
        return self.folder / f"lib/python{_get_python_version()}/site-packages/ascendnpuir/bin"

    def run_llvm(self, program: str, *arguments: str | Path) -> None:
        """Run one of `PROGRAMS`; raises TritonToolError with its words."""
        libraries = os.pathsep.join(str(self.llvm / name) for name in ("lib", "usr/lib/x86_64-linux-gnu"))
        run_tool([self.llvm / "bin" / program, *arguments], {**os.environ, "LD_LIBRARY_PATH": libraries})


def run_tool(command: list[str | Path], env: dict[str, str] | None = None) -> None:
    """Run to the end; raises TritonToolError with the program's own words."""
    done = subprocess.run(list(map(str, command)), env=env, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        words = (done.stderr + done.stdout).strip()[-4000:]
        raise TritonToolError(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n{words}")


def get_triton_root() -> Path:
    """Where everything of this tool lies."""
    return get_cache_root() / "npu_triton"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One maker at a time; others wait and then find the result."""
    get_triton_root().mkdir(parents=True, exist_ok=True)
    with (get_triton_root() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _get_python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def ensure_environment() -> Environment:
    """The environment and the LLVM tools, made when they are missing (about two minutes).

    Raises:
        TritonToolError, CacheError: what cannot be had here, and why.
    """
    here = (_get_python_version(), platform.machine())
    if here != ("3.11", "x86_64"):
        raise TritonToolError(f"Python {here[0]} on {here[1]}: the pinned wheels are for Python 3.11 on x86_64")
    pins = [wheel.requirement() for wheel in WHEELS]
    key = compute_digest(RECIPE, sys.version, sys.base_prefix, *REQUIREMENTS, *pins)[:16]
    tools = compute_digest(RECIPE, DEBIAN_VERSION, *PACKAGES.values())[:16]
    made = Environment(get_triton_root() / f"env-{key}", get_triton_root() / f"llvm-{tools}", f"{key}-{tools}")
    with locked("env"):
        stamp = made.folder / "made.stamp"
        if not stamp.exists():
            _make_environment(made)
            stamp.write_text(key)
        if not made.llvm.exists():
            _unpack_llvm(made.llvm)
    return made


def _make_environment(made: Environment) -> None:
    started = time.monotonic()
    print(f"[npu-triton] making the environment {made.folder} ...", flush=True)
    shutil.rmtree(made.folder, ignore_errors=True)
    base = Path(sys.base_prefix) / "bin" / f"python{_get_python_version()}"
    run_tool([base if base.exists() else sys.executable, "-m", "venv", made.folder])
    wheels = fetch_wheels(WHEELS, str(made.python))
    try:
        installer = find_installer(made.python)
        installer.install(REQUIREMENTS, with_torch=True)
        for wheel in wheels:  # alone: torch asks for no triton here, and triton-ascend declares nothing
            installer.reinstall(wheel)
    except subprocess.CalledProcessError as error:
        raise CacheError(f"`{' '.join(map(str, error.cmd))}` failed with {error.returncode}") from error
    print(f"[npu-triton] making the environment: {time.monotonic() - started:.0f} s", flush=True)


def _unpack_llvm(final: Path) -> None:
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        raise TritonToolError(f"{', '.join(missing)} not found: the LLVM {DEBIAN_VERSION} tools are Debian packages")
    with staging(final.parent) as folder:
        unpacked, kept = folder / "unpacked", folder / "kept"
        print(f"[npu-triton] unpacking LLVM {DEBIAN_VERSION} of Debian ...", flush=True)
        for package in _download_packages(folder):
            run_tool(["dpkg", "-x", package, unpacked])
        (kept / "bin").mkdir(parents=True)
        for name in PROGRAMS:
            shutil.copy(unpacked / "usr/lib/llvm-19/bin" / name, kept / "bin" / name)
        shutil.copytree(
            unpacked / "usr/lib/x86_64-linux-gnu", kept / "lib", symlinks=False, ignore_dangling_symlinks=True
        )
        publish(kept, final)


def _download_packages(folder: Path) -> list[Path]:
    """The packages, each with its pinned hash; apt-get downloads into its working folder."""
    command = ["apt-get", "-q", "download", *(f"{name}={DEBIAN_VERSION}" for name in PACKAGES)]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    found = {path.name.partition("_")[0]: path for path in folder.glob("*.deb")}
    if done.returncode != 0 or set(found) != set(PACKAGES):
        raise TritonToolError(f"`{' '.join(command)}` failed (`apt-get update` first?):\n{done.stderr.strip()}")
    for name, path in found.items():
        if (digest := compute_sha256(path)) != PACKAGES[name]:
            raise CacheError(f"{path.name}: sha256 is {digest}, wanted {PACKAGES[name]}")
    return list(found.values())
