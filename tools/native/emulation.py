# SPDX-License-Identifier: Apache-2.0
"""qemu-user and aarch64's glibc, so that cross-built tests run here: the machine's own, else Debian's packages.

The packages are unpacked into the cache, nothing is installed. apt checks the archive's signature; a pinned hash would
break with Debian's next point release, so the hash of what came is recorded and checked from then on.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.cache import CacheError, compute_sha256, get_cache_root, publish, staging

PACKAGES: Final = ("qemu-user-static", "libc6-arm64-cross")
EMULATOR: Final = "qemu-aarch64-static"
SYSROOT: Final = "usr/aarch64-linux-gnu"
LOADER: Final = "lib/ld-linux-aarch64.so.1"


def find_emulation(machine: str) -> list[str]:
    """What to put before a program of `machine`; nothing on that machine itself.

    Raises:
        CacheError: neither the system nor Debian's archive has it.
    """
    if machine == platform.machine():
        return []
    if machine != "aarch64":
        raise CacheError(f"programs for {machine} cannot be run on {platform.machine()}")
    emulator, sysroot = shutil.which(EMULATOR), Path("/") / SYSROOT
    if emulator and (sysroot / LOADER).exists():
        return [emulator, "-L", str(sysroot)]
    folder = get_cache_root() / "tools/qemu-aarch64"
    if not is_intact(folder):
        shutil.rmtree(folder, ignore_errors=True)
        _fetch(folder)
    return [str(folder / EMULATOR), "-L", str(folder / SYSROOT)]


def is_intact(folder: Path) -> bool:
    """Whether the emulator still has the hash that it came with."""
    try:
        return (folder / "sha256.txt").read_text() == compute_sha256(folder / EMULATOR)
    except OSError:
        return False


def _fetch(final: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise CacheError(
            f"{EMULATOR} is not on this machine, and without apt it is not fetched; install qemu-user-static"
        )
    print(f"[native] fetching {' and '.join(PACKAGES)} from Debian's archive", flush=True)
    with staging(final.parent) as folder:
        for package in download(folder / "packages"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "files")], check=True)
        (folder / "kept").mkdir()
        (folder / "files/usr/bin" / EMULATOR).rename(folder / "kept" / EMULATOR)
        (folder / "kept/usr").mkdir()
        (folder / "files" / SYSROOT).rename(folder / "kept" / SYSROOT)
        (folder / "kept/sha256.txt").write_text(compute_sha256(folder / "kept" / EMULATOR))
        publish(folder / "kept", final)


def download(folder: Path) -> list[Path]:
    """The packages' files; with package lists of our own where the system's are missing or too old."""
    folder.mkdir()
    done = _run(["apt-get", "download", *PACKAGES], folder)
    if done.returncode != 0:
        options = _private_lists(folder.parent)
        _run(["apt-get", *options, "update"], folder)
        done = _run(["apt-get", *options, "download", *PACKAGES], folder)
    found = sorted(folder.glob("*.deb"))
    if done.returncode != 0 or len(found) != len(PACKAGES):
        raise CacheError(f"apt-get could not download {' and '.join(PACKAGES)}:\n{done.stdout.strip()}")
    return found


def _private_lists(folder: Path) -> list[str]:
    (folder / "lists/partial").mkdir(parents=True)
    (folder / "archives/partial").mkdir(parents=True)
    return [
        "-o",
        f"Dir::State::lists={folder / 'lists'}",
        "-o",
        f"Dir::Cache={folder}",
        "-o",
        "APT::Sandbox::User=root",
    ]


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
