# SPDX-License-Identifier: Apache-2.0
"""The environment of the NPU tests: torch's CPU build and the unmodified torch-npu wheel, away from the engine's own.

torch-npu makes a plain `import torch` fail where its libraries are missing, so it must never lie in `.venv`. The
environment is made in the cache folder under a hash of what goes in, at its final place (environments do not move);
its stamp is written last, and a folder without a stamp is made anew.
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

from tools.cache import CacheError, PinnedWheel, compute_digest, fetch_wheels, get_cache_root
from tools.installer import find_installer

TORCH_NPU_VERSION: Final = "2.13.0"
REQUIREMENTS: Final = (
    "torch==2.13.0",
    "numpy",
    "pyyaml",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "msgspec>=0.19",
    "pyzmq>=26",  # what an engine's worker half needs of the package
)
RECIPE: Final = "1"  # raise it when this file installs something differently
TORCH_NPU_SHA256: Final = {
    ("3.10", "x86_64"): "3084a5ebdab53d45acbbf3154f7cb45d1e00c463b76f0b9b2149b96c1f12ba67",
    ("3.11", "x86_64"): "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0",
    ("3.12", "x86_64"): "f27cf44167b6e0a4b8cf82097c688d2bf532edf503d3e5d6a7ced80a7e759ea6",
    ("3.13", "x86_64"): "20441bfb56c4054a427560ff413fa033db921b993e06c3d67d0f7edc23d40513",
    ("3.10", "aarch64"): "da6b7785ce005a5459308ad7c88104a5739865d6f23d453dd53ff967c7e17200",
    ("3.11", "aarch64"): "d0e64a90b3e640b0274511e47c65284d3a7dedae5f6ad2b95d91de12ff9a29ff",
    ("3.12", "aarch64"): "ebb895735bf3c347e8c971c3f9083bb5ec032a1b139876ce019f03ee408d81fa",
    ("3.13", "aarch64"): "359a055deaf9b94de35ffadff2e68e9fb4a3b3576796ed3617e85d16a42df259",
}


class NpuBuildError(Exception):
    """The environment or one of its libraries cannot be made here; the text says what to do."""


@dataclass(frozen=True)
class Environment:
    """A finished environment."""

    folder: Path
    key: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / f"lib/python{version}/site-packages"


def get_npu_root() -> Path:
    """Where everything of this tool lies."""
    return get_cache_root() / "npu"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One builder at a time; others wait and then find the result."""
    get_npu_root().mkdir(parents=True, exist_ok=True)
    with (get_npu_root() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_torch_npu_wheel() -> PinnedWheel:
    """The pinned wheel for this interpreter.

    Raises:
        NpuBuildError: torch-npu has none for it.
    """
    tag = (f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())
    if tag not in TORCH_NPU_SHA256:
        known = ", ".join(f"{python} on {machine}" for python, machine in TORCH_NPU_SHA256)
        raise NpuBuildError(
            f"torch-npu {TORCH_NPU_VERSION} has no pinned wheel for Python {tag[0]} on {tag[1]}; there are: {known}"
        )
    return PinnedWheel("torch-npu", TORCH_NPU_VERSION, (TORCH_NPU_SHA256[tag],))


def ensure_environment() -> Environment:
    """The environment, made when it is missing (a minute or two).

    Raises:
        NpuBuildError, CacheError: what cannot be had, and from where.
    """
    wheel = find_torch_npu_wheel()
    base = os.path.realpath(sys.executable)
    key = compute_digest(sys.version, base, platform.machine(), RECIPE, *REQUIREMENTS, wheel.requirement())[:16]
    made = Environment(get_npu_root() / f"env-{key}", key)
    stamp = made.folder / "made.stamp"
    if stamp.exists():
        return made
    with locked("env"):
        if not stamp.exists():
            _make(made, wheel)
            stamp.write_text(key)
    return made


def _make(made: Environment, wheel: PinnedWheel) -> None:
    started = time.monotonic()
    print(f"[npu] making the environment {made.folder} ...", flush=True)
    shutil.rmtree(made.folder, ignore_errors=True)
    try:
        subprocess.run([_find_base_python(), "-m", "venv", str(made.folder)], check=True)
        (path,) = fetch_wheels((wheel,), str(made.python))
        installer = find_installer(made.python)
        installer.install(REQUIREMENTS, with_torch=True)
        installer.reinstall(path)  # alone: what it says it needs is CANN's
    except subprocess.CalledProcessError as error:
        raise CacheError(f"`{' '.join(map(str, error.cmd))}` failed with {error.returncode}") from error
    print(f"[npu] making the environment: {time.monotonic() - started:.0f} s", flush=True)


def _find_base_python() -> str:
    """The interpreter under the running one, so that the environment outlives a virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix) / "bin" / version
    return str(base) if base.exists() else sys.executable
