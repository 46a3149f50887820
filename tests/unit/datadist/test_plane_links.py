# SPDX-License-Identifier: Apache-2.0
"""The C++ plane under the host `llm_datadist`: connections, descriptors per call, many links, peers that end."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.datadist.datadist_peer import (
    BLOCK_BYTES,
    MIB,
    NUM_BLOCKS,
    NUM_TENSORS,
    Node,
    holds,
    make_options,
    pull_status,
)
from vllm_ascend_pd.datadist.host.cache_manager import CacheManager
from vllm_ascend_pd.datadist.host.engine import Engine
from vllm_ascend_pd.datadist.host.options import OPTION_CONNECTIONS, OPTION_THREADS, parse_options
from vllm_ascend_pd.datadist.host.pools import Pools
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.datadist.types import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo

OK = LLMStatusCode.LLM_SUCCESS
BOTH = pytest.mark.parametrize("transport", ["auto", "tcp"])


class Small:
    """An engine of its own (several fit into a process) with one blocks cache that is not in an arena."""

    def __init__(self, cluster_id: int, *, listen: bool, **options: str) -> None:
        given = {**make_options({"listen": listen, "transport": "tcp"}), **options}
        self.engine = Engine(cluster_id, parse_options(given))
        self.manager = CacheManager(self.engine, Pools(given))
        self.memory = (ctypes.c_char * (4 * MIB))()
        base = -(-ctypes.addressof(self.memory) // (2 * MIB)) * (2 * MIB)
        ctypes.memset(base, cluster_id % 256, 4096)
        self.bytes = (ctypes.c_char * 4096).from_address(base)
        key = BlocksCacheKey(cluster_id, 0)
        self.cache = self.manager.register_blocks_cache(CacheDesc(1, [4, 1024], DataType.DT_INT8), [base], key)

    def link(self, other: Small) -> LLMStatusCode:
        info = LLMClusterInfo()
        info.remote_cluster_id = other.engine.cluster_id
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", other.engine.listen_port)
        return self.engine.link_clusters([info], 20_000)[0]


@pytest.fixture
def make_small():
    made: list[Small] = []

    def make(cluster_id: int, **options):
        made.append(Small(cluster_id, **options))
        return made[-1]

    yield make
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda small: small.engine.finalize(), made))


@pytest.mark.parametrize("value", ["0", "17", "-1", "two", ""])
def test_numbers_of_connections_and_threads_are_bounded(value):
    for name in (OPTION_CONNECTIONS, OPTION_THREADS):
        with pytest.raises(LLMException, match=name) as failure:
            parse_options({**make_options({"listen": False}), name: value if value != "17" else "65"})
        assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(("ours", "theirs", "agreed"), [("1", "4", 1), ("4", "1", 1), ("3", "4", 3), ("16", "16", 16)])
def test_a_link_has_as_many_connections_as_both_allow(make_small, ours, theirs, agreed):
    server = make_small(2, listen=True, **{OPTION_CONNECTIONS: theirs})
    client = make_small(1, listen=False, **{OPTION_CONNECTIONS: ours})
    assert client.link(server) is OK
    assert client.engine.plane.stats().connections == server.engine.plane.stats().connections == agreed
    client.manager.pull_blocks(BlocksCacheKey(2), client.cache, [3], [1], tensor_num_per_layer=1)
    assert client.bytes[1024:2048] == bytes([2]) * 1024
    assert client.bytes[:1024] == bytes([1]) * 1024


@BOTH
def test_one_pull_is_one_call_whatever_the_layers_and_one_run_when_consecutive(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node()
    node.link(2, peer.port)
    link = node.datadist._engine.get_link(2)
    blocks = list(range(NUM_BLOCKS))
    node.pull(2, blocks, blocks, src_layer_range=range(0, 4), dst_layer_range=range(0, 4), tensor_num_per_layer=1)
    stats = link.stats
    assert (stats.calls, stats.runs, stats.failures) == (1, 1, 0)
    assert stats.num_bytes == NUM_TENSORS * NUM_BLOCKS * BLOCK_BYTES
    assert stats.pieces in (1, NUM_TENSORS)  # mapped: tensors that lie one after the other are one
    node.pull(2, [1, 3, 5, 7], [10, 20, 30, 40])
    assert link.stats.calls == 2
    assert link.stats.runs <= 3  # evenly spaced
    assert pull_status(node, 2, [NUM_BLOCKS], [0]) is LLMStatusCode.LLM_PARAM_INVALID
    assert link.stats.failures == 1
    assert pull_status(node, 2, [1], [1]) is OK  # a refused pull spoils nothing


def test_a_tcp_pull_is_one_request_per_connection(make_small):
    server = make_small(2, listen=True)
    client = make_small(1, listen=False)
    assert client.link(server) is OK
    for _ in range(3):
        client.manager.pull_blocks(BlocksCacheKey(2), client.cache, [0, 1], [0, 1], tensor_num_per_layer=1)
    deadline = time.monotonic() + 10
    while server.engine.plane.stats().num_bytes < 3 * 2048:  # counted after the last byte has left
        assert time.monotonic() < deadline
        time.sleep(0.001)
    stats = server.engine.plane.stats()
    assert (stats.requests, stats.num_bytes) == (3, 3 * 2048)  # small: over one of the two


def test_two_hundred_links_of_one_process_work(make_small):
    server = make_small(1000, listen=True)
    threads_before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        clients = list(pool.map(lambda i: make_small(i + 1, listen=False, **{OPTION_THREADS: "1"}), range(200)))
        assert list(pool.map(lambda client: client.link(server), clients)) == [OK] * 200
        assert len(server.engine.links.all()) == 200
        assert server.engine.plane.stats().connections == 400
        key = BlocksCacheKey(1000)
        list(
            pool.map(
                lambda client: client.manager.pull_blocks(key, client.cache, [0], [1], tensor_num_per_layer=1), clients
            )
        )
        assert all(client.bytes[1024:2048] == bytes([1000 % 256]) * 1024 for client in clients)
        for number in (1, 77, 200):  # and the other way
            server.manager.pull_blocks(BlocksCacheKey(number), server.cache, [0], [2], tensor_num_per_layer=1)
            assert server.bytes[2048:3072] == bytes([number % 256]) * 1024
    # In Python a link costs no thread: each engine has one that waits for events.
    assert threading.active_count() - threads_before <= 200 + 8


@BOTH
def test_peer_killed_while_it_serves_is_a_timeout_never_a_success(make_peer, make_node, transport):
    """Pulls run one after the other until the kill meets one of them."""
    peer = make_peer(transport=transport)
    node = make_node(timeout_ms=60_000)
    node.link(2, peer.port)
    blocks = list(range(NUM_BLOCKS))
    killer = threading.Timer(0.2, peer.process.kill)
    killer.start()
    status = OK
    while status is OK:
        status = pull_status(node, 2, blocks, blocks)
    killer.join()
    assert status is LLMStatusCode.LLM_TIMEOUT
    assert pull_status(node, 2, blocks, blocks) is LLMStatusCode.LLM_NOT_YET_LINK


def test_links_that_end_leave_no_descriptors(make_node, make_peer):
    peer = make_peer()
    node: Node = make_node()
    node.link(2, peer.port)
    assert node.unlink(2) is OK
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert node.link(2, peer.port) is OK
        assert pull_status(node, 2, [1], [2]) is OK
        assert node.unlink(2, peer.port, False) is OK
    assert len(os.listdir("/proc/self/fd")) == before
    assert holds(node, 2, 1, 2)
