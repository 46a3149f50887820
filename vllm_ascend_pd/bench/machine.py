# SPDX-License-Identifier: Apache-2.0
"""What a number must be read with: the machine, the versions, the command. Reads /proc and /sys."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vllm_ascend_pd


def describe_machine() -> dict[str, Any]:
    """CPU, caches, memory, kernel, load."""
    return {
        "cpu": _find_line("/proc/cpuinfo", "model name") or platform.processor(),
        "architecture": platform.machine(),
        "cpus": count_cpus(),
        "l3_bytes": read_cache_bytes(),
        "memory_bytes": int((_find_line("/proc/meminfo", "MemTotal") or "0").split()[0]) * 1024,
        "kernel": platform.release(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load_average": list(os.getloadavg()),
    }


def describe_run(argv: list[str], packages: Iterable[str]) -> dict[str, Any]:
    """When, with what."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": argv,
        "python": sys.version.split()[0],
        "versions": {"vllm-ascend-pd": vllm_ascend_pd.__version__, **read_versions(packages)},
    }


def read_versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed here."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def count_cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def read_cache_bytes() -> int:
    """The largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = [_parse_size(_read(str(path))) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or 32 << 20


def _parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text and text[-1] in units else int(text or 0)


def _find_line(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
