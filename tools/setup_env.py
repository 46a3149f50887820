# SPDX-License-Identifier: Apache-2.0
"""Make `.venv` in the repository root: the fork's wheel, its dependencies, and the development tools.

Standard library only. `tools/setup.sh` starts it with a system Python; it makes a bare `.venv` and goes on
inside. `.venv/setup-stamp.json` holds the hashes of what went in: nothing changed costs half a second, a change
of our own sources costs a new wheel and its installation alone, anything else a full installation.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
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
from tools.installer import find_installer
from tools.native import building

ROOT: Final = Path(__file__).resolve().parent.parent
VENV: Final = ROOT / ".venv"
STAMP: Final = VENV / "setup-stamp.json"
LANE: Final = "cpu"
RECIPE: Final = "1"  # raise it when this file installs something differently
PYTHON_SOURCES: Final = ("vllm", "vllm_ascend_pd", "tools/fork", "tools/native", "pyproject.toml", "LICENSE", "NOTICE")
WHEEL_SOURCES: Final = (*PYTHON_SOURCES, *building.SOURCES)


@dataclass(frozen=True)
class Stamp:
    """What `.venv` was made from. Equal stamps mean equal environments."""

    interpreter: str  # the Python under it, and the machine
    tools: str  # the development tools that pyproject names
    requirements: str  # what the wheel asks for
    wheel: str  # the wheel's sources

    @staticmethod
    def read(path: Path) -> Stamp | None:
        """The stamp of an environment that was finished; None when there is none that we can read."""
        try:
            return Stamp(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Only after everything it names is installed."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print what is being done, and how long it took."""
    print(f"[setup] {title} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"[setup] {title}: {time.monotonic() - started:.1f} s", flush=True)


def compute_interpreter_key() -> str:
    """Changes when `.venv` must be made anew: another Python, another machine, another place."""
    base = os.path.realpath(sys.executable)
    return compute_digest(sys.version, base, platform.machine(), str(VENV), RECIPE)


def get_venv_python() -> Path:
    """The interpreter inside `.venv`."""
    return VENV / "bin/python"


def make_venv() -> None:
    """A bare environment made by the running Python, replacing one made by another."""
    marker = VENV / "made-by.txt"
    key = compute_interpreter_key()
    if get_venv_python().exists() and marker.exists() and marker.read_text() == key:
        return
    with step(f"making .venv with Python {platform.python_version()} ({os.path.realpath(sys.executable)})"):
        if VENV.exists():
            shutil.rmtree(VENV)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        marker.write_text(key)


def read_dev_requirements() -> list[str]:
    """The `dev` group of pyproject.toml."""
    # Python 3.10 has no tomllib, but the pip of every environment carries a copy.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    data = toml.loads((ROOT / "pyproject.toml").read_text())
    return [str(line) for line in data["dependency-groups"]["dev"]]


def compute_wheel_key(lane: str = LANE) -> str:
    """Hash of all that the wheel is made from; UPSTREAM.toml names upstream's artefact by its own hash."""
    return compute_digest(lane, compute_tree_digest(ROOT, (n for n in WHEEL_SOURCES if (ROOT / n).exists())))


def find_cached_wheel(key: str) -> Path | None:
    """The wheel of these sources, if it is in the cache and still has the hash that it had."""
    folder = get_cache_root() / "wheels" / key
    for wheel in sorted(folder.glob("*.whl")):
        recorded = wheel.with_name(wheel.name + ".sha256")
        if recorded.exists() and recorded.read_text().strip() == compute_sha256(wheel):
            return wheel
    if folder.exists():
        print(f"[setup] {folder} is damaged, building the wheel again")
        shutil.rmtree(folder)
    return None


def build_wheel(key: str, lane: str = LANE) -> Path:
    """The fork's wheel for these sources, from the cache or made by `tools.fork`."""
    wheel = find_cached_wheel(key)
    if wheel is not None:
        return wheel
    wheels = get_cache_root() / "wheels"
    with step(f"building the fork's wheel ({lane} lane)"), staging(wheels) as folder:
        command = [str(get_venv_python()), "-m", "tools.fork", "wheel", "--lane", lane, "--out", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
        built = list(folder.glob("*.whl"))
        if len(built) != 1:
            raise CacheError(f"`{' '.join(command)}` left {len(built)} wheels in its output folder, wanted one")
        built[0].with_name(built[0].name + ".sha256").write_text(compute_sha256(built[0]) + "\n")
        publish(folder, wheels / key)
    prune_wheels(wheels, keep=4)
    return next(iter((wheels / key).glob("*.whl")))


def build_libraries() -> None:
    """The host libraries, for the wheel and for tests that import the package from the checkout."""
    key = building.compute_key(platform.machine(), ROOT)
    with step("building the host libraries") if not building.is_built(key) else nullcontext():
        building.install(building.build(root=ROOT), ROOT)


def prune_wheels(wheels: Path, keep: int) -> None:
    """A wheel is 150 MB and each change of a source makes one: keep the newest few."""
    folders = sorted(
        (path for path in wheels.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime
    )
    for folder in folders[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def compute_requirements_key(wheel: Path) -> str:
    """Hash of the wheel's dependency list."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    return hashlib.sha256("\n".join(x for x in lines if x.startswith("Requires-Dist:")).encode()).hexdigest()


def install_everything(old: Stamp | None, interpreter: str) -> None:
    """Bring `.venv` to what the checkout says, doing no more than the difference to `old`."""
    build_libraries()
    tools = compute_digest(*read_dev_requirements())
    wheel_key = compute_wheel_key()
    old = old if old is not None and old.interpreter == interpreter else None
    if old is not None and old.tools == tools and old.wheel == wheel_key:
        print("[setup] .venv is up to date")
        return
    installer = find_installer(get_venv_python())
    STAMP.unlink(missing_ok=True)  # from here on the environment is neither the old nor the new one
    if old is None or old.tools != tools:
        with step("installing the development tools"):
            installer.install(read_dev_requirements())
    wheel = build_wheel(wheel_key)
    requirements = compute_requirements_key(wheel)
    if old is not None and old.requirements == requirements and old.tools == tools:
        with step(f"installing {wheel.name} (its dependencies are there)"):
            installer.reinstall(wheel)
    else:
        with step(f"installing {wheel.name} and its dependencies"):
            stale = any(VENV.glob("lib/python*/site-packages/vllm-*.dist-info"))
            installer.install([str(wheel), *read_dev_requirements()], with_torch=True)
            if stale:  # same version, other content: a resolver calls that satisfied
                installer.reinstall(wheel)
    Stamp(interpreter, tools, requirements, wheel_key).write(STAMP)


def main() -> int:
    """Stage one (a system Python) makes `.venv`; stage two (inside it) fills it."""
    parser = argparse.ArgumentParser(description="Make or refresh .venv.")
    parser.add_argument("--inside", metavar="KEY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if platform.system() != "Linux":
        print(f"setup: the CPU lane is built from a Linux wheel; this is {platform.system()}", file=sys.stderr)
        return 1
    if arguments.inside is None:
        make_venv()
        inside = [str(get_venv_python()), "-m", "tools.setup_env", "--inside", compute_interpreter_key()]
        os.chdir(ROOT)
        os.execv(inside[0], inside)
    try:
        install_everything(Stamp.read(STAMP), arguments.inside)
    except (CacheError, subprocess.CalledProcessError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
