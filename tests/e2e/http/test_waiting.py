# SPDX-License-Identifier: Apache-2.0
"""While a decode engine only waits for handoffs it takes no CPU: upstream would step, and its ranks would spin."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builders import prompt
from tests.e2e.http.conftest import Deployment
from tests.e2e.http.servers import Server
from tests.e2e.http.test_front_door import complete, wait_for

pytestmark = [pytest.mark.http, pytest.mark.timeout(120)]
SPINS_S = 1.5  # a worker rank spins on its message queue for a second after a step
WATCHED_S = 1.5


@contextmanager
def frozen(*servers: Server) -> Iterator[None]:
    """All their processes stopped; shorter than the 5 s of a probe, so that nobody gives them up."""
    try:
        for server in servers:
            os.killpg(server.pid, signal.SIGSTOP)
        yield
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGCONT)


def cpu_s(server: Server) -> float:
    """CPU time of its engine core and worker ranks, in seconds (/proc/PID/stat: fields 2, 5, 14 and 15 of proc(5))."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(") ")
        except OSError:
            continue
        fields = rest.split()
        if int(fields[2]) == server.pid and "(VLLM::" in name:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_engine_that_waits_for_a_handoff_sleeps(deployment: Deployment):
    tokens = prompt(50, seed=810)
    expected = complete(deployment.aggregated, tokens)
    assert cpu_s(deployment.front) > 1, "the engine's processes are not found"
    loaded = deployment.front.status()["totals"]["tokens"]
    with ThreadPoolExecutor() as threads:
        with frozen(*deployment.prefill):
            answer = threads.submit(complete, deployment.front, tokens)
            wait_for(lambda: deployment.front.status()["transfers_in_flight"]["admitted"] == 1, "it waits", 3)
            time.sleep(SPINS_S)
            before = cpu_s(deployment.front)
            time.sleep(WATCHED_S)
            assert cpu_s(deployment.front) - before < WATCHED_S / 5
            assert not answer.done()
        assert answer.result() == expected
    assert deployment.front.status()["totals"]["tokens"] - loaded == len(tokens) - 1


def test_a_new_request_wakes_it(deployment: Deployment):
    """One that needs no prefill instance is answered while another waits."""
    waits, runs = prompt(50, seed=811), prompt(1, seed=812)
    expected = complete(deployment.aggregated, waits), complete(deployment.aggregated, runs)
    with ThreadPoolExecutor() as threads:
        with frozen(*deployment.prefill):
            first = threads.submit(complete, deployment.front, waits)
            wait_for(lambda: deployment.front.status()["transfers_in_flight"]["admitted"] == 1, "it waits", 3)
            begun = time.monotonic()
            assert complete(deployment.front, runs) == expected[1]
            assert time.monotonic() - begun < WATCHED_S
            assert not first.done()
        assert first.result() == expected[0]
