# SPDX-License-Identifier: Apache-2.0
"""Tiny runs of `bench transfer` with real processes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.bench.fakes import SPEC_BY_NAME, make_plan
from vllm_ascend_pd.bench.progress import BenchProgress
from vllm_ascend_pd.bench.transfer.run import TransferRun


def run(plan):
    progress = BenchProgress(Console(file=io.StringIO()))
    with progress:
        return TransferRun(plan, progress).run()


def states(result):
    return {outcome.spec.name: outcome.state for outcome in result.outcomes}


def test_limit_raw_and_ours_move_verified_bytes():
    names = ["copy-limit", "ours-mapped", "ours-tcp", "raw-tcp"]
    result = run(make_plan(names))
    assert states(result) == dict.fromkeys(names, "ran"), [outcome.reason for outcome in result.outcomes]
    counted = [sample for sample in result.samples if sample.phase == "round"]
    assert len(counted) == len(names) * 2
    assert all(sample.seconds > 0 and sample.cpu_seconds >= 0 for sample in counted)
    facts = {outcome.spec.name: outcome.facts for outcome in result.outcomes}
    assert facts["ours-mapped"]["transport"] == "mapped"
    assert facts["ours-tcp"]["transport"] == "tcp"


def test_a_corrupted_byte_ends_the_contender_and_only_it():
    result = run(make_plan(["copy-limit", "raw-tcp"], options={"limit": {"corrupt": "1"}}))
    assert states(result) == {"copy-limit": "wrong bytes", "raw-tcp": "ran"}
    assert "byte 1048575 of 1048576 is wrong" in result.outcomes[0].reason


def test_a_peer_that_is_not_installed_is_reported_and_the_rest_goes_on():
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    absent = replace(SPEC_BY_NAME["nixl"], module="mooncake")
    result = run(make_plan(["copy-limit"], specs=(SPEC_BY_NAME["copy-limit"], absent), peers_python=python))
    assert states(result) == {"copy-limit": "ran", "nixl": "not installed"}
    assert "mooncake" in result.outcomes[1].reason


def test_an_interpreter_that_cannot_start_is_one_failed_contender():
    result = run(make_plan(["copy-limit", "mooncake"], peers_python="/nonexistent/python"))
    assert states(result) == {"copy-limit": "ran", "mooncake": "failed"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_command_and_all_its_children(number):
    command = [sys.executable, "-m", "vllm_ascend_pd.bench", "transfer", "--payload-mib", "1", "--pool-mib", "4"]
    command += ["--contenders", "copy-limit,raw-tcp", "--rounds", "100000", "--pieces", "64K"]
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=root, text=True)
    for line in process.stderr:
        if "round 1" in line:
            break
    children = list_children(process.pid)
    assert len(children) == 3
    process.send_signal(number)
    assert process.wait(30) == 130
    assert "interrupted" in process.stderr.read()
    process.stderr.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "children are left"


def list_children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
