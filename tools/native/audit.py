# SPDX-License-Identifier: Apache-2.0
"""Has auditwheel say on which glibc the built libraries load, and compares that with our own reading of them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.cache import CacheError, staging
from tools.fork import metadata
from tools.native import elf
from tools.native.building import PLACE, ROOT, build
from tools.native.pins import AUDITWHEEL
from tools.native.toolchain import GLIBC, MACHINES, fetch_tool


def audit() -> bool:
    """Both machines' libraries, each packed into a wheel."""
    is_good = True
    for machine in sorted(MACHINES, key=lambda name: name != platform.machine()):
        with staging(ROOT / "build") as folder:
            libraries = build(machine)
            wheel = pack(libraries, machine, folder)
            tag = ask_auditwheel(wheel)
        needs = ", ".join(
            f"{name}: glibc {'.'.join(map(str, elf.read_library(name, path.read_bytes()).glibc))}"
            for name, path in libraries.items()
        )
        is_kept = is_within(tag, machine, GLIBC)
        print(f"[native] audit {machine}: auditwheel says {tag}; {needs}{'' if is_kept else '; want at most 2.28'}")
        is_good = is_good and is_kept
    return is_good


def pack(libraries: dict[str, Path], machine: str, folder: Path) -> Path:
    """A wheel with nothing but the libraries."""
    info = "pd_audit-1.dist-info"
    tag = f"py3-none-linux_{machine}"
    files = {f"{PLACE}/{name}": path.read_bytes() for name, path in libraries.items()}
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: pd-audit\nVersion: 1\n"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: pd\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = f"{info}/RECORD"
    files[record] = metadata.record_text([metadata.record_row(n, d) for n, d in files.items()], record).encode()
    wheel = folder / f"pd_audit-1-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def ask_auditwheel(wheel: Path) -> str:
    """The platform tag that auditwheel finds a wheel consistent with.

    Raises:
        CacheError: it found none; its words are in the message.
    """
    folders = [str(fetch_tool(pin)) for pin in AUDITWHEEL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "COLUMNS": "200"}
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    return parse_answer(done.stdout + done.stderr)


def parse_answer(text: str) -> str:
    """The platform tag in auditwheel's prose."""
    found = re.search(r"consistent with\s+the\s+following\s+platform\s+tag:\s+\"([a-z0-9_]+)\"", text)
    if found is None:
        raise CacheError(f"auditwheel named no platform tag:\n{text.strip()}")
    return found[1]


def is_within(tag: str, machine: str, glibc: tuple[int, ...]) -> bool:
    """Whether a platform tag is manylinux of that machine and asks for no newer glibc."""
    found = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{machine}", tag)
    return found is not None and (int(found[1]), int(found[2])) <= glibc
