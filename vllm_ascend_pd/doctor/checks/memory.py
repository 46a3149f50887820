# SPDX-License-Identifier: Apache-2.0
"""Memory: room for the KV arena, huge pages under it, and the process's limits. CPU hosts mostly."""

from __future__ import annotations

import os
from collections.abc import Callable

from vllm_ascend_pd.doctor.check import Check, fail, not_applicable, ok, warn
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.memory.available import AvailableMemory
from vllm_ascend_pd.native.shared_memory import MemoryFile

PROBE_BYTES = 4 << 20
SMALL_BYTES = 2 << 30
LEAST_BYTES = 256 << 20
SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
LEAST_OPEN_FILES = 4096
_WORK_BY_HINT = ("always", "within_size", "advise", "force")
_RAISE = f"as root: echo advise > {SHMEM_ENABLED}"


def check_arena_room(available: AvailableMemory) -> Check:
    """Whether there is memory for a KV cache at all; how much is wanted only the model knows."""
    key = "memory.arena"
    seen = f"{available.describe()}; /dev/shm and its size do not matter (the arena is a memory file without a name)"
    if available.num_bytes < LEAST_BYTES:
        return fail(key, seen, "free memory, or raise the control group's limit (docker --memory, Pod memory limit)")
    if available.num_bytes < SMALL_BYTES:
        return warn(
            key, seen, "KV cache, weights and activations share it: lower --kv-cache-memory-bytes or allow more memory"
        )
    return ok(key, seen)


def probe_huge_pages() -> tuple[str, str]:
    """(how many pages of a small arena are huge, why the rest is not). Below `Arena`, which would log it as a cache."""
    huge_bytes, code = MemoryFile("doctor", PROBE_BYTES, None).populate(0, PROBE_BYTES, want_huge=True)
    told = f"{huge_bytes >> 20} of {PROBE_BYTES >> 20} MiB"
    return told, f"MADV_COLLAPSE: {os.strerror(code)}" if code else ""


def check_huge_pages(host: Host, probe: Callable[[], tuple[str, str]] = probe_huge_pages) -> Check:
    """By the kernel's hint, else by MADV_COLLAPSE, which the arena uses itself."""
    key, text = "memory.huge-pages", host.read(SHMEM_ENABLED)
    chosen = text.partition("[")[2].partition("]")[0]
    try:
        told, reason = probe()
    except (MemoryError, OSError) as error:
        return fail(key, f"an arena of {PROBE_BYTES >> 20} MiB cannot be made: {error}", "allow the process memory")
    seen = f"shmem_enabled is {chosen or 'not there'}; {told} of a probe in huge pages"
    whole = f"{PROBE_BYTES >> 20} of {PROBE_BYTES >> 20} MiB"
    if told == whole:
        return ok(key, seen)
    if chosen in _WORK_BY_HINT and not reason:
        return warn(key, seen, "memory may be fragmented, as root: echo 1 > /proc/sys/vm/compact_memory")
    return warn(key, f"{seen}{f' ({reason})' if reason else ''}", f"pulls are slower without: {_RAISE}")


def check_open_files(host: Host) -> Check:
    """Links, clients and blocks of memory each take descriptors."""
    key, limit = "memory.open-files", host.open_files_limit()
    if 0 <= limit < LEAST_OPEN_FILES:
        return warn(
            key, f"at most {limit} open files", "ulimit -n 65536 (docker --ulimit nofile=65536, systemd LimitNOFILE)"
        )
    return ok(key, "no limit" if limit < 0 else f"at most {limit} open files")


def check_locked_memory(host: Host) -> Check:
    """Only drivers pin memory; the host implementation does not."""
    key, limit = "memory.locked", host.locked_memory_limit()
    if host.count_npus() == 0:
        return not_applicable(key, "nothing is locked in memory without an NPU")
    if 0 <= limit < SMALL_BYTES:
        return warn(
            key,
            f"at most {limit >> 10} KiB may be locked",
            "the driver may have to pin host memory: ulimit -l unlimited (docker --ulimit memlock=-1)",
        )
    return ok(key, "no limit" if limit < 0 else f"up to {limit >> 20} MiB may be locked")
