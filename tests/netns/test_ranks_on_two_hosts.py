# SPDX-License-Identifier: Apache-2.0
"""One prefill instance whose two TP ranks sit on two hosts (vLLM's multi-node multiprocessing) hands over.

Nobody types an address of a rank: the decode side learns each rank's from the handshake. The oracle is a server of the
same tensor parallel size, because the order of summation differs with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.http.servers import START_TIMEOUT_S
from tests.netns.network import Host, HostServer, Network, why_not
from tests.netns.servers import complete, start, tokens_of, write_secret

pytestmark = [
    pytest.mark.http,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() != "", reason=why_not() or "-"),
]


@dataclass(frozen=True)
class Deployment:
    """The prefill instance's two hosts; decode and the oracle have both ranks on one host each."""

    prefill_hosts: tuple[Host, Host]
    prefill: HostServer
    decode: HostServer
    aggregated: HostServer


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("two-hosts")
    secret = ("--pd-secret-file", str(write_secret(folder)))
    two = ("--tensor-parallel-size", "2")
    servers: list[HostServer] = []
    with Network(4) as network:
        first, second, third, fourth = network.hosts

        def run(name: str, host: Host, *arguments: str, cores: tuple[int, ...] = (0, 1)) -> HostServer:
            servers.append(start(name, host, folder, *two, *arguments, cores=cores))
            return servers[-1]

        try:
            nodes = (*secret, "--pd-role", "prefill", "--nnodes", "2", "--master-addr", first.address)
            prefill = run("prefill", first, *nodes, "--node-rank", "0", cores=(0,))
            run("prefill-node-1", second, *nodes, "--node-rank", "1", "--headless", cores=(1,))
            decode = run("decode", third, *secret, "--pd-role", "decode", "--pd-prefill", prefill.url)
            aggregated = run("aggregated", fourth)
            deadline = time.monotonic() + START_TIMEOUT_S
            for server in (prefill, decode, aggregated):
                server.wait_healthy(deadline)
            yield Deployment((first, second), prefill, decode, aggregated)
        finally:
            for server in reversed(servers):
                server.terminate()
            for server in reversed(servers):
                server.stop()


@pytest.mark.parametrize("length", [2, 33, 300])
def test_what_two_hosts_computed_is_what_one_server_would_have(deployment: Deployment, length: int) -> None:
    before = deployment.decode.status()["totals"]["tokens"]
    assert tokens_of(deployment.decode, length, length) == tokens_of(deployment.aggregated, length, length)
    assert deployment.decode.status()["totals"]["tokens"] - before == length - 1


def test_each_rank_is_pulled_from_the_host_that_it_sits_on(deployment: Deployment) -> None:
    complete(deployment.decode, list(range(1, 80)))
    links = {link["tp_rank"]: link for link in deployment.decode.status()["links"]}
    assert {rank: link["host"] for rank, link in links.items()} == {
        rank: host.address for rank, host in enumerate(deployment.prefill_hosts)
    }
    assert {link["transport"] for link in links.values()} == {"tcp"}
    assert all(link["wire"] for link in links.values())


def test_a_rank_on_the_other_host_gives_its_lease_back_too(deployment: Deployment) -> None:
    complete(deployment.decode, list(range(1, 90)))
    deadline = time.monotonic() + 10
    while deployment.prefill.status()["leases"]["held"]:
        assert time.monotonic() < deadline, deployment.prefill.status()
        time.sleep(0.1)
