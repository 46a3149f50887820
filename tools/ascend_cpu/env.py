# SPDX-License-Identifier: Apache-2.0
"""The environment of lane `ascend-cpu`: its wheel, the torch that its kernels were built against, the test tools.

It lies in the cache folder under a hash of what it asks for, at its final place (environments do not move). The wheel
itself is put in anew when our sources change. Who uses the environment holds a shared lock; who changes it, an
exclusive one, so that another checkout's change waits for a test run to end.
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

from tools import setup_env
from tools.cache import CacheError, compute_digest, get_cache_root
from tools.fork.lanes import get_lane
from tools.installer import Installer, find_installer

LANE: Final = "ascend-cpu"
RECIPE: Final = "1"  # raise it when this file installs something differently
TEST_TOOLS: Final = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")  # their versions are pyproject's
# torch's CUDA build, which is all that the package index has for x86-64, does not load these at import. Without triton
# vLLM also runs as it does beside torch's CPU build, which brings none.
LEFT_OUT: Final = ("triton", "nvidia-cusolver", "nvidia-cuda-nvrtc", "nvidia-nvtx")


@dataclass(frozen=True)
class Environment:
    """A finished environment."""

    folder: Path
    wheel: str  # the key of the wheel in it

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def made_stamp(self) -> Path:
        """Exists once everything but the wheel is there."""
        return self.folder / "made.stamp"

    @property
    def wheel_stamp(self) -> Path:
        """Holds the key of the wheel that is there."""
        return self.folder / "wheel.stamp"

    def is_ready(self) -> bool:
        """Whether nothing is left to do."""
        return self.made_stamp.exists() and self.wheel_stamp.exists() and self.wheel_stamp.read_text() == self.wheel


@contextmanager
def environment() -> Iterator[Environment]:
    """The environment, made or brought up to date first; nobody changes it meanwhile.

    Raises:
        CacheError: something cannot be had or built; the text says what.
    """
    setup_env.build_libraries()  # the tests import vllm_ascend_pd from the checkout
    wheel_key = setup_env.compute_wheel_key(LANE)
    wheel = setup_env.build_wheel(wheel_key, LANE)
    root = get_cache_root() / "ascend_cpu"
    root.mkdir(parents=True, exist_ok=True)
    made = Environment(root / f"env-{_compute_key(wheel)}", wheel_key)
    with (root / f".{made.folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not made.is_ready():  # again, if another checkout came in between the two locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            _bring_up_to_date(made, wheel)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield made


def list_test_tools() -> list[str]:
    """The lines of pyproject's `dev` group that the tests of this lane need."""
    lines = setup_env.read_dev_requirements()
    return [line for line in lines if line.partition(">")[0].partition("=")[0] in TEST_TOOLS]


def _compute_key(wheel: Path) -> str:
    interpreter = (sys.version, os.path.realpath(sys.executable), platform.machine())
    asked = (setup_env.compute_requirements_key(wheel), *list_test_tools(), *LEFT_OUT)
    return compute_digest(RECIPE, *interpreter, *asked)[:16]


def _bring_up_to_date(made: Environment, wheel: Path) -> None:
    started = time.monotonic()
    print(f"[{LANE}] bringing {made.folder} up to date ...", flush=True)
    made.wheel_stamp.unlink(missing_ok=True)
    try:
        if not made.made_stamp.exists():
            _make(made, wheel)
        else:
            find_installer(made.python).reinstall(wheel)
    except subprocess.CalledProcessError as error:
        raise CacheError(f"`{' '.join(map(str, error.cmd))}` failed with {error.returncode}") from error
    made.wheel_stamp.write_text(made.wheel)
    print(f"[{LANE}] bringing the environment up to date: {time.monotonic() - started:.0f} s", flush=True)


def _make(made: Environment, wheel: Path) -> None:
    shutil.rmtree(made.folder, ignore_errors=True)
    subprocess.run([_find_base_python(), "-m", "venv", str(made.folder)], check=True)
    installer: Installer = find_installer(made.python)
    release = get_lane(LANE).torch
    installer.install([str(wheel), *list_test_tools()], with_torch=True, torch_release=release, leave_out=LEFT_OUT)
    made.made_stamp.touch()


def _find_base_python() -> str:
    """The interpreter under the running one, so that the environment outlives a virtual environment."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(base) if base.exists() else sys.executable
