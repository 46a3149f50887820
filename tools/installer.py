# SPDX-License-Identifier: Apache-2.0
"""How packages get into `.venv`: uv where it can be had, else the environment's own pip.

uv comes from the package index with a pinned hash and is used as a plain file from the cache; it is several times
quicker than pip and compiles bytecode in parallel (without bytecode, importing vLLM takes a minute). This
file also decides which build of torch is taken, and says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import CacheError, PinnedWheel, compute_sha256, fetch_wheels, get_cache_root, staging

UV: Final = PinnedWheel(
    "uv",
    "0.13.9",
    (
        "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",  # x86-64, glibc
        "ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375",  # aarch64, glibc
    ),
)
PROBE_TIMEOUT_S: Final = 60


@dataclass(frozen=True)
class Installer:
    """Installs into the environment of `python`. `uv` is None where only pip is there."""

    python: Path
    uv: Path | None

    def install(
        self,
        requirements: Sequence[str],
        *,
        with_torch: bool = False,
        torch_release: str = "*",
        leave_out: Sequence[str] = (),
    ) -> None:
        """Resolve and install; raises CalledProcessError with the tool's own words on the terminal.

        `torch_release` is the one that `requirements` pin. `leave_out` names projects to go without although something
        asks for them; pip cannot do that and installs them.
        """
        torch = self._choose_torch(requirements, torch_release) if with_torch else []
        with _write_overrides(leave_out if self.uv else ()) as overrides:
            self._run([*torch, *overrides, *requirements])

    def reinstall(self, wheel: Path) -> None:
        """Put this wheel in place of the one that is there, and touch nothing else."""
        again = ["--reinstall"] if self.uv else ["--force-reinstall"]
        self._run(["--no-deps", *again, str(wheel)])

    def _run(self, arguments: Sequence[str]) -> None:
        subprocess.run([*self._command(), *arguments], check=True)

    def _command(self) -> list[str]:
        found = [part for place in get_find_links() for part in ("--find-links", place)]
        if self.uv is None:
            return [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *found]
        command = [str(self.uv), "pip", "install", "--python", str(self.python), "--compile-bytecode"]
        return [*command, *found]

    def _choose_torch(self, requirements: Sequence[str], release: str) -> list[str]:
        """Arguments that pick torch's CPU build: a local file, PyTorch's CPU index, or neither."""
        local = find_local_torch(get_find_links(), release)
        if local is not None:
            print(f"[setup] torch: the CPU build on this machine, {local}", flush=True)
            return []
        if self.uv is not None and self._can_use_cpu_index(requirements):
            print("[setup] torch: the CPU build of PyTorch's own index", flush=True)
            return ["--torch-backend", "cpu"]
        print(
            "[setup] torch: PyTorch's CPU index is not reachable, taking the build of the package index."
            " On x86-64 that is the CUDA build: it works without a GPU and costs several GB.",
            flush=True,
        )
        return []

    def _can_use_cpu_index(self, requirements: Sequence[str]) -> bool:
        command = [*self._command(), "--dry-run", "-q", "--torch-backend", "cpu", *requirements]
        try:
            done = subprocess.run(command, timeout=PROBE_TIMEOUT_S, check=False, capture_output=True)
            return done.returncode == 0
        except subprocess.TimeoutExpired:
            return False


def get_find_links() -> list[str]:
    """Local folders of wheels that pip is configured to look into; uv does not read pip's configuration."""
    places = os.environ.get("PIP_FIND_LINKS", "")
    if not places:
        for scope in ("global", "install"):
            done = subprocess.run(
                ["python3", "-m", "pip", "config", "get", f"{scope}.find-links"],
                capture_output=True,
                text=True,
                check=False,
            )
            places += " " + (done.stdout if done.returncode == 0 else "")
    return list(dict.fromkeys(places.split()))


def find_local_torch(places: Sequence[str], release: str = "*") -> Path | None:
    """A CPU build of torch in one of the local folders."""
    for place in places:
        for wheel in sorted(Path(place.removeprefix("file://")).glob(f"torch-{release}+cpu-*.whl")):
            return wheel
    return None


@contextmanager
def _write_overrides(leave_out: Sequence[str]) -> Iterator[list[str]]:
    """uv's arguments that make it go without these projects: a marker that no Python meets."""
    if not leave_out:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "overrides.txt"
        file.write_text("".join(f"{name} ; python_version < '3'\n" for name in leave_out))
        yield ["--override", str(file)]


def find_installer(python: Path) -> Installer:
    """uv from the cache or the package index; pip when uv cannot be had (said on the terminal)."""
    try:
        (wheel,) = fetch_wheels((UV,), str(python))
        return Installer(python, _unpack_uv(wheel))
    except (CacheError, OSError, KeyError, zipfile.BadZipFile) as error:
        print(f"[setup] uv is not to be had, using pip (several minutes longer): {error}", flush=True)
        return Installer(python, None)


def _unpack_uv(wheel: Path) -> Path:
    """The executable inside uv's wheel, kept beside the other tools and compared with the wheel at each use."""
    with zipfile.ZipFile(wheel) as archive:
        name = f"uv-{UV.version}.data/scripts/uv"
        target = get_cache_root() / "tools" / compute_sha256(wheel)[:16] / "uv"
        size = archive.getinfo(name).file_size
        if target.exists() and target.stat().st_size == size and _has_crc(target, archive.getinfo(name).CRC):
            return target
        with staging(get_cache_root() / "tools") as folder:
            staged = folder / "uv"
            with archive.open(name) as source, staged.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            staged.chmod(0o755)
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.replace(target)
    return target


def _has_crc(path: Path, crc: int) -> bool:
    import zlib

    return zlib.crc32(path.read_bytes()) == crc
