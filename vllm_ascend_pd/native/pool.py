# SPDX-License-Identifier: Apache-2.0
"""Copy threads: C++ threads that copy plans beside the engine, on CPUs that the engine's own threads do not use.

`CopyPool` and `CopyJob` wrap the library's; `choose_threads` is pure and decides how many threads run where. The pool
that a process shares is made at the first call of `get_shared_pool`; it does not survive a fork.
"""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_ascend_pd.native import library
from vllm_ascend_pd.native.copying import (
    CopyPlan,
    CopyState,
    Stores,
    _functions,
    _to_timeout_ms,
    kernel_name,
    make_places,
)

THREADS_VARIABLE: Final = "VLLM_PD_COPY_THREADS"
CPUS_VARIABLE: Final = "VLLM_PD_COPY_CPUS"
ENGINE_CPUS_VARIABLE: Final = "VLLM_CPU_OMP_THREADS_BIND"  # upstream's: CPU lists by local rank, "|" between them
_MAX_DEFAULT_THREADS: Final = 4  # more threads than this do not make a memory bus faster


@dataclass(frozen=True)
class CopyThreads:
    """How many copy threads there are, which CPUs they may use (none: any of the process), and why."""

    num_threads: int
    cpus: tuple[int, ...]
    reason: str


def parse_cpus(text: str, name: str) -> tuple[int, ...]:
    """`0-3,8` as numbers. Raises ValueError that names the variable."""
    cpus: set[int] = set()
    try:
        for part in filter(None, (part.strip() for part in text.split(","))):
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a list of CPUs like 0-3,8") from None
    return tuple(sorted(cpus))


def choose_threads(environment: Mapping[str, str], allowed: frozenset[int], local_rank: int = 0) -> CopyThreads:
    """The copy threads of a process that may use the CPUs `allowed`.

    `VLLM_PD_COPY_CPUS` and `VLLM_PD_COPY_THREADS` decide. Otherwise the CPUs that the engine's threads leave; where
    nothing is left, one thread that the scheduler places. Raises ValueError for variables that make no sense.
    """
    configured = environment.get(CPUS_VARIABLE, "")
    if configured:
        cpus, reason = parse_cpus(configured, CPUS_VARIABLE), CPUS_VARIABLE
        if not set(cpus) <= allowed:
            raise ValueError(f"{CPUS_VARIABLE}: {configured!r} is not within this process's CPUs {sorted(allowed)}")
    else:
        cpus, reason = _left_by_engine(environment, allowed, local_rank)
    default = min(len(cpus), _MAX_DEFAULT_THREADS) if cpus else 1
    return CopyThreads(_read_num_threads(environment, default), cpus, reason)


def _left_by_engine(
    environment: Mapping[str, str], allowed: frozenset[int], local_rank: int
) -> tuple[tuple[int, ...], str]:
    binding = environment.get(ENGINE_CPUS_VARIABLE, "")
    if not binding or binding in ("all", "auto", "nobind"):
        return (), f"not pinned: {ENGINE_CPUS_VARIABLE} names no CPUs"
    ranks = binding.split("|")
    engine = parse_cpus(ranks[min(local_rank, len(ranks) - 1)], ENGINE_CPUS_VARIABLE)
    left = tuple(sorted(allowed - set(engine)))
    if not left:
        return (), f"not pinned: {ENGINE_CPUS_VARIABLE} leaves none of this process's CPUs"
    return left, f"what {ENGINE_CPUS_VARIABLE} leaves"


def _read_num_threads(environment: Mapping[str, str], default: int) -> int:
    text = environment.get(THREADS_VARIABLE, "")
    if not text:
        return default
    if not text.isdigit() or int(text) > 1024:
        raise ValueError(f"{THREADS_VARIABLE}: {text!r} is not a number of threads from 0 to 1024")
    return int(text)


class CopyJob:
    """A copy in progress. Dropping it cancels the copy and waits for the chunk that is being copied."""

    def __init__(self, handle: int, pool: CopyPool, plan: CopyPlan, checksums: array[int]) -> None:
        self.plan = plan
        self._pool = pool  # a pool that is collected cancels its jobs
        self.checksums = checksums  # filled in when the job is DONE; empty for a plan without
        self._handle = handle
        # The callback holds the checksums' memory: threads write to it until the job is freed.
        self._free = weakref.finalize(self, _free_job, handle, checksums)
        self._free.atexit = False

    def poll(self) -> CopyState:
        """How it stands, without blocking."""
        return CopyState(library.check(_functions().job_poll(self._handle)))

    def wait(self, deadline: float | None = None) -> CopyState:
        """Help to copy until the job is done; RUNNING when `deadline` (monotonic seconds) passed first."""
        return CopyState(library.check(_functions().job_wait(self._handle, _to_timeout_ms(deadline))))

    def cancel(self) -> None:
        """Stop at the next chunk; `wait` returns when nothing is touched any more."""
        _functions().job_cancel(self._handle)


def _free_job(handle: int, checksums: array[int]) -> None:
    _functions().job_free(handle)


class CopyPool:
    """`num_threads` threads on `cpus`. With none, each job is copied by the thread that waits for it."""

    def __init__(self, num_threads: int, cpus: tuple[int, ...] = ()) -> None:
        functions = _functions()
        words = array("i", cpus)
        self.num_threads, self.cpus = num_threads, cpus
        self._handle = library.check_handle(functions.pool_create(num_threads, words.buffer_info()[0], len(words)))
        self._free = weakref.finalize(self, functions.pool_free, self._handle)
        self._free.atexit = False

    @property
    def handle(self) -> int:
        """Of the library's pool, for other parts of it. Valid as long as this object."""
        return self._handle

    def submit(self, plan: CopyPlan, *, stores: Stores = Stores.AUTO, deadline: float | None = None) -> CopyJob:
        """Start a copy and return at once. Both sides' memory must stay valid until the job is over."""
        checksums = make_places(plan)
        address, count = checksums.buffer_info()
        timeout_ms = _to_timeout_ms(deadline)
        handle = _functions().submit(self._handle, plan.handle, stores, timeout_ms, address if count else None, count)
        return CopyJob(library.check_handle(handle), self, plan, checksums)

    def close(self) -> None:
        """Cancel what is queued, wait for what runs, end the threads. No call may follow."""
        self._free()


_lock = threading.Lock()  # guards _shared
_shared: tuple[int, CopyPool, CopyThreads] | None = None  # with the process that made it


def get_shared_pool(local_rank: int = 0) -> CopyPool:
    """This process's pool, made by the first caller. Raises ValueError for wrong environment variables."""
    return _get_shared(local_rank)[0]


def _get_shared(local_rank: int) -> tuple[CopyPool, CopyThreads]:
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            threads = choose_threads(os.environ, frozenset(os.sched_getaffinity(0)), local_rank)
            _shared = (os.getpid(), CopyPool(threads.num_threads, threads.cpus), threads)
        return _shared[1], _shared[2]


def describe(local_rank: int = 0) -> dict[str, Any]:
    """For status: kernels and threads of this process."""
    _, threads = _get_shared(local_rank)
    crc: bytes = _functions().crc32c_name()
    return {
        "kernel": kernel_name(),
        "crc32c": crc.decode(),
        "num_threads": threads.num_threads,
        "cpus": list(threads.cpus),
        "placement": threads.reason,
    }
