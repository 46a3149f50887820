# SPDX-License-Identifier: Apache-2.0
"""The guide for two servers, followed by a script: a secret copied, `vllm pd doctor` on both, a pair, a prompt.

Namespaces stand for the servers. See docs/guides for the text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.builders import prompt
from tests.e2e.http.servers import START_TIMEOUT_S, Process
from tests.netns.network import Host, HostServer, Network, why_not
from tests.netns.servers import complete, start, tokens_of, write_secret

pytestmark = [
    pytest.mark.http,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() != "", reason=why_not() or "-"),
]
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
DOCTOR_PORT = 8300


@dataclass(frozen=True)
class Pair:
    """Prefill and decode on a host each; the oracle beside prefill."""

    folder: Path
    secret: tuple[str, str]
    prefill_host: Host
    decode_host: Host
    prefill: HostServer
    decode: HostServer
    aggregated: HostServer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("two-servers")
    secret = ("--pd-secret-file", str(write_secret(folder)))
    servers: list[HostServer] = []
    with Network(2) as network:
        first, second = network.hosts

        def run(name: str, host: Host, *arguments: str, **more: Any) -> HostServer:
            servers.append(start(name, host, folder, *arguments, **more))
            return servers[-1]

        try:
            prefill = run("prefill", first, *secret, "--pd-role", "prefill")
            asking = ("--pd-role", "decode", "--pd-prefill", prefill.url, "--pd-deadline", "15s")
            decode = run("decode", second, *secret, *asking, cores=(1,))
            aggregated = run("aggregated", first, port=8200)
            deadline = time.monotonic() + START_TIMEOUT_S
            for server in servers:
                server.wait_healthy(deadline)
            yield Pair(folder, secret, first, second, prefill, decode, aggregated)
        finally:
            for server in reversed(servers):
                server.terminate()
            for server in reversed(servers):
                server.stop()


def run_doctor(pair: Pair, host: Host, *arguments: str) -> tuple[int, Any]:
    """Exit code and report."""
    command = host.command([*VLLM, "pd", "doctor", *pair.secret, "--json", *arguments])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def failed_checks(report: Any) -> Sequence[Any]:
    """What the doctor calls a failure."""
    return [check for check in report["checks"] if check["status"] == "fail"]


def test_the_doctors_of_both_servers_find_the_way_between_them_in_order(pair: Pair) -> None:
    address = f"{pair.prefill_host.address}:{DOCTOR_PORT}"
    listen = [*VLLM, "pd", "doctor", *pair.secret, "--listen", address]
    other = Process("doctor", pair.prefill_host.command(listen), pair.folder)
    try:
        deadline = time.monotonic() + 90
        while True:
            code, report = run_doctor(pair, pair.decode_host, "--peer", f"http://{address}")
            if not failed_checks(report) or time.monotonic() > deadline or other.poll() is not None:
                break
            time.sleep(1)
        assert not failed_checks(report), (report, other.log_tail())
        assert code == 0
        assert any("GB/s" in check["seen"] for check in report["checks"]), report
    finally:
        other.stop()


@pytest.mark.parametrize("length", [2, 33, 400])
def test_the_pair_answers_as_one_server_would(pair: Pair, length: int) -> None:
    before = pair.decode.status()["totals"]["tokens"]
    assert tokens_of(pair.decode, length, length) == tokens_of(pair.aggregated, length, length)
    assert pair.decode.status()["totals"]["tokens"] - before == length - 1
    assert {link["transport"] for link in pair.decode.status()["links"]} == {"tcp"}


def num_fallbacks(pair: Pair) -> float:
    """Prompts that decode computed itself, for whatever reason."""
    return sum(v for k, v in pair.decode.metrics().items() if k.startswith("vllm:pd_remote_kv_fallback_total"))


def test_a_pulled_cable_costs_time_but_no_answer_and_a_plugged_one_is_noticed(pair: Pair) -> None:
    complete(pair.decode, prompt(60, seed=1))  # so that there is a link to be cut
    fallbacks = num_fallbacks(pair)
    pair.prefill_host.unplug()
    try:
        started = time.monotonic()
        alone = complete(pair.decode, prompt(70, seed=2), timeout_s=60)
        assert time.monotonic() - started < 40
    finally:
        pair.prefill_host.plug_in()
    assert num_fallbacks(pair) == fallbacks + 1
    assert alone["choices"][0]["token_ids"] == tokens_of(pair.aggregated, 70, 2)
    deadline = time.monotonic() + 60
    for seed in range(3, 1000):
        before = pair.decode.status()["totals"]["tokens"]
        assert tokens_of(pair.decode, 80, seed) == tokens_of(pair.aggregated, 80, seed)
        if pair.decode.status()["totals"]["tokens"] > before:  # it came from prefill again
            return
        assert time.monotonic() < deadline, "prefill was not found again"
        time.sleep(1)
