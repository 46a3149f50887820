# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take: what the machine has, and what its control groups allow.

Needed because a shared memory file over-commits: a machine that is short kills a process instead of refusing.
Reads files under /proc and /sys only; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 reports "no limit" as a number near 2**63


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that can still be taken; `cgroup_*` are None where no limit applies."""

    machine_bytes: int
    cgroup_bytes: int | None = None
    cgroup_limit_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """The binding one of the two."""
        return self.machine_bytes if self.cgroup_bytes is None else min(self.machine_bytes, self.cgroup_bytes)

    def describe(self) -> str:
        """For an error text: both numbers, in MiB."""
        text = f"MemAvailable is {self.machine_bytes >> 20} MiB"
        if self.cgroup_bytes is None or self.cgroup_limit_bytes is None:
            return f"{text}, no cgroup limit"
        limit, left = self.cgroup_limit_bytes >> 20, self.cgroup_bytes >> 20
        return f"{text}, the cgroup limit is {limit} MiB of which {left} MiB are left"


def read_available_memory(root: Path = Path("/")) -> AvailableMemory:
    """What this process can still take now. `root` is where proc and sys are (tests give another)."""
    machine = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    groups = [group for group in _read_groups(root) if group[0] < _UNLIMITED_BYTES]
    if not groups:
        return AvailableMemory(machine)
    limit, used = min(groups, key=lambda group: group[0] - group[1])
    return AvailableMemory(machine, max(0, limit - used), limit)


def _read_groups(root: Path) -> list[tuple[int, int]]:
    """(limit, used without reclaimable file cache) of each memory cgroup from ours up to the top."""
    found: list[tuple[int, int]] = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _walk(root / "sys/fs/cgroup/memory", path, *names)
    return found


def _walk(mount: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    """Limits count at every level. In a container only the top may exist under the mount."""
    found: list[tuple[int, int]] = []
    here = mount / path.strip("/")
    while True:
        limit, used = _read_text(here / limit_name).strip(), _read_text(here / used_name).strip()
        if limit.isdigit() and used.isdigit():
            cache = 0
            for line in _read_text(here / "memory.stat").splitlines():
                name, _, value = line.partition(" ")
                if name == cache_name:
                    cache = int(value)
            found.append((int(limit), max(0, int(used) - cache)))
        if here == mount or mount not in here.parents:
            return found
        here = here.parent


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
