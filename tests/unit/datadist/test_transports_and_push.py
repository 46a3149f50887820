# SPDX-License-Identifier: Apache-2.0
"""Which transport a link gets, links of unusual shape, concurrent pulls, and pushes."""

from __future__ import annotations

import threading

import pytest

from tests.unit.datadist.datadist_peer import NUM_TENSORS, holds, pattern, pull_status
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode

OK = LLMStatusCode.LLM_SUCCESS
BOTH = pytest.mark.parametrize("transport", ["auto", "tcp"])


@pytest.mark.parametrize(
    ("ours", "theirs", "status", "transport"),
    [
        ("auto", "auto", OK, "mapped"),
        ("mapped", "auto", OK, "mapped"),
        ("auto", "mapped", OK, "mapped"),
        ("auto", "tcp", OK, "tcp"),
        ("tcp", "auto", OK, "tcp"),
        ("mapped", "tcp", LLMStatusCode.LLM_LINK_FAILED, None),
        ("tcp", "mapped", LLMStatusCode.LLM_LINK_FAILED, None),
    ],
)
def test_transport_is_what_both_sides_allow(make_node, make_peer, ours, theirs, status, transport):
    peer = make_peer(transport=theirs)
    node = make_node(transport=ours)
    assert node.link(2, peer.port) is status
    if transport:
        assert node.transport(2) == transport
        assert pull_status(node, 2, [1], [1]) is OK


def test_mapped_is_an_error_when_the_peers_memory_is_in_no_arena(make_node, make_peer):
    peer = make_peer(arena=False)
    node = make_node(transport="mapped")
    assert node.link(2, peer.port) is LLMStatusCode.LLM_LINK_FAILED
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK


def test_another_boot_id_means_tcp(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    object.__setattr__(node.datadist._engine._identity, "boot_id", "another machine")
    assert node.link(2, peer.port) is OK
    assert node.transport(2) == "tcp"
    assert pull_status(node, 2, [1], [1]) is OK


def test_a_process_can_link_to_itself_but_not_pull_from_itself(make_node):
    node = make_node(listen=True)
    assert node.link(1, node.port) is OK
    assert pull_status(node, 1, [1], [2]) is LLMStatusCode.LLM_PARAM_INVALID
    key = node.module.BlocksCacheKey(1)
    node.manager.push_blocks(key, node.cache, [1], [2])  # pushing is not refused
    assert holds(node, 1, 1, 2)
    assert node.unlink(1) is OK


def test_wrong_expected_cluster_id_shows_at_the_transfer(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    assert node.link(9, peer.port) is OK
    assert pull_status(node, 9, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert pull_status(node, 2, [1], [1]) is OK


def test_concurrent_pulls_on_one_link_all_arrive(make_node, make_peer):
    peer = make_peer(transport="tcp")
    node = make_node()
    node.link(2, peer.port)
    results = []
    threads = [
        threading.Thread(target=lambda block=block: results.append(pull_status(node, 2, [block], [block])))
        for block in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [OK] * 16
    assert all(holds(node, 2, block, block) for block in range(16))


@BOTH
def test_push_writes_the_peers_blocks_layer_by_layer(make_node, make_peer, transport):
    peer = make_peer(transport=transport, extra_caches=True)
    node = make_node()
    node.link(2, peer.port)
    key = node.module.BlocksCacheKey(2)
    node.manager.push_blocks(key, node.cache, [1, 2, 9], [20, 21, 0])
    assert peer.call("check", 1, 1, 20) == peer.call("check", 1, 9, 0) == [True] * NUM_TENSORS
    layers = {"src_layer_range": range(0, 1), "dst_layer_range": range(1, 2)}
    node.manager.push_blocks(key, node.cache, [5], [30], **layers)
    node.pull(2, [30], [31], tensor_num_per_layer=2)
    assert node.block(2, 31) == pattern(1, 0, 5)
    assert node.block(0, 31) == pattern(2, 0, 30)
    node.manager.push_blocks(key, node.cache, [5], [33], tensor_num_per_layer=8)  # zero layers: nothing moves
    assert peer.call("check", 2, 33, 33) == [True] * NUM_TENSORS
    refused = [
        (key, [1], [64], {}),
        (key, [64], [1], {}),
        (key, [1, 2], [1], {}),
        (key, [], [1], {}),
        (key, [1], [], {}),
        (key, [1], [1], {"src_layer_range": range(0, 1)}),
        (key, [1], [1], {"src_layer_range": range(2, 3), "dst_layer_range": range(0, 1)}),
        (key, [1], [1], {"src_layer_range": range(0, 1), "dst_layer_range": range(2, 3)}),
        (key, [1], [1], {"tensor_num_per_layer": 3}),
        (node.module.BlocksCacheKey(2, 1), [1], [1], {}),
    ]
    for target, src, dst, kwargs in refused:
        with pytest.raises(LLMException) as failure:
            node.manager.push_blocks(target, node.cache, src, dst, **kwargs)
        assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID, (src, dst, kwargs)
    with pytest.raises(LLMException) as failure:
        node.manager.push_blocks(node.module.BlocksCacheKey(2, 5), node.cache, [1], [1])
    assert failure.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_push_cache_writes_a_slot(make_node, make_peer):
    from vllm_ascend_pd.datadist.types import CacheDesc, CacheKeyByIdAndIndex, DataType

    peer = make_peer(extra_caches=True)
    node = make_node()
    slots = node.manager.register_cache(CacheDesc(4, [64, 32 << 10], DataType.DT_INT8), node.addresses)
    node.link(2, peer.port)
    node.manager.push_cache(CacheKeyByIdAndIndex(2, 3, 2), slots, 7)  # remote slot 2 begins at block 32
    assert peer.call("check", 1, 7, 32) == [True] * NUM_TENSORS
    for args, kwargs in [
        ((CacheKeyByIdAndIndex(2, 3, 4), slots), {}),
        ((CacheKeyByIdAndIndex(2, 3), slots), {"size": 5}),
        ((CacheKeyByIdAndIndex(2, 1), slots), {}),
        ((CacheKeyByIdAndIndex(2, 3), slots, 64), {}),
        ((CacheKeyByIdAndIndex(2, 3), node.cache), {}),
    ]:
        with pytest.raises(LLMException) as failure:
            node.manager.push_cache(*args, **kwargs)
        assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
