# SPDX-License-Identifier: Apache-2.0
"""Copy threads: jobs from Python, and which CPUs the threads may use."""

from __future__ import annotations

import gc
import os
import time
from array import array

import numpy as np
import pytest

from vllm_ascend_pd.native import pool as pool_module
from vllm_ascend_pd.native.copying import CopyPlan, CopyState
from vllm_ascend_pd.native.pool import CopyPool, CopyThreads, choose_threads, describe, parse_cpus

MIB = 1 << 20


def _plan(num_bytes: int = 8 * MIB) -> tuple[CopyPlan, np.ndarray, np.ndarray]:
    src, dst = np.full(num_bytes, 7, np.uint8), np.zeros(num_bytes, np.uint8)
    plan = CopyPlan()
    plan.add(array("Q", [src.ctypes.data]), array("Q", [dst.ctypes.data]), [0], [0], num_bytes)
    return plan, src, dst


def test_job_is_done_by_a_thread_that_nobody_waits_for():
    plan, _, dst = _plan()
    pool = CopyPool(1)
    job = pool.submit(plan)
    end = time.monotonic() + 60
    while job.poll() is CopyState.RUNNING and time.monotonic() < end:
        pass
    assert job.poll() is CopyState.DONE
    assert (dst == 7).all()
    pool.close()


def test_job_keeps_its_pool():
    plan, _, dst = _plan()
    job = CopyPool(1).submit(plan)
    gc.collect()
    assert job.wait() is CopyState.DONE
    assert (dst == 7).all()


def test_waiter_copies_where_there_is_no_thread():
    plan, _, dst = _plan()
    job = CopyPool(0).submit(plan)
    assert job.poll() is CopyState.RUNNING
    assert job.wait(time.monotonic() - 1) is CopyState.RUNNING
    assert not dst.any()
    assert job.wait() is CopyState.DONE
    assert (dst == 7).all()


def test_cancelled_job_stays_cancelled():
    plan, _, dst = _plan()
    job = CopyPool(0).submit(plan)
    job.cancel()
    assert job.wait() is CopyState.CANCELLED
    assert not dst.any()


def test_job_ends_at_its_deadline():
    plan, _, dst = _plan()
    job = CopyPool(0).submit(plan, deadline=time.monotonic())
    assert job.wait() is CopyState.DEADLINE
    assert not dst.any()


def test_dropped_job_touches_nothing_any_more():
    plan, _, dst = _plan(64 * MIB)
    pool = CopyPool(1)
    job = pool.submit(plan)
    del job
    gc.collect()
    dst[:] = 0
    pool.close()
    assert not dst.any()


@pytest.mark.parametrize(
    ("environment", "rank", "expected"),
    [
        ({}, 0, (1, ())),
        ({"VLLM_CPU_OMP_THREADS_BIND": "all"}, 0, (1, ())),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-5"}, 0, (2, (6, 7))),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-2|3-6"}, 1, (4, (0, 1, 2, 7))),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, 0, (4, (2, 3, 4, 5, 6, 7))),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-7"}, 0, (1, ())),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-5", "VLLM_PD_COPY_CPUS": "1,3"}, 0, (2, (1, 3))),
        ({"VLLM_PD_COPY_CPUS": "0-6", "VLLM_PD_COPY_THREADS": "6"}, 0, (6, (0, 1, 2, 3, 4, 5, 6))),
        ({"VLLM_PD_COPY_THREADS": "0"}, 0, (0, ())),
    ],
)
def test_threads_keep_off_the_engines_cpus(environment, rank, expected):
    chosen = choose_threads(environment, frozenset(range(8)), rank)
    assert (chosen.num_threads, chosen.cpus) == expected
    assert chosen.reason


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"VLLM_PD_COPY_CPUS": "9"}, r"VLLM_PD_COPY_CPUS: '9' is not within this process's CPUs"),
        ({"VLLM_PD_COPY_CPUS": "a-b"}, r"VLLM_PD_COPY_CPUS: 'a-b' is not a list of CPUs"),
        ({"VLLM_PD_COPY_THREADS": "-1"}, r"VLLM_PD_COPY_THREADS: '-1' is not a number"),
        ({"VLLM_PD_COPY_THREADS": "99999"}, r"from 0 to 1024"),
    ],
)
def test_wrong_variables_are_named(environment, match):
    with pytest.raises(ValueError, match=match):
        choose_threads(environment, frozenset(range(8)))


def test_cpu_lists_are_sets():
    assert parse_cpus("3, 0-2,2", "X") == (0, 1, 2, 3)


def test_cpu_that_the_process_may_not_use_is_refused():
    with pytest.raises(ValueError, match="CPU 1000 is not one of this process's"):
        CopyPool(1, (1000,))


def test_shared_pool_is_one_per_process(monkeypatch):
    first = pool_module.get_shared_pool()
    assert pool_module.get_shared_pool() is first
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    monkeypatch.setattr(pool_module, "_shared", pool_module._shared)
    assert pool_module.get_shared_pool() is not first


def test_status_says_what_runs_where(monkeypatch):
    threads = CopyThreads(0, (), "as a test wants")
    monkeypatch.setattr(pool_module, "_shared", (os.getpid(), CopyPool(0), threads))
    status = describe()
    assert status["num_threads"] == 0
    assert status["placement"] == "as a test wants"
    assert status["crc32c"] in ("sse4.2", "arm", "table")
