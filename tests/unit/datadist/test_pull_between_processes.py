# SPDX-License-Identifier: Apache-2.0
"""Pulls from another process, over both transports; every byte of the cache is compared."""

from __future__ import annotations

import pytest

from tests.unit.datadist.datadist_peer import NUM_BLOCKS, NUM_TENSORS, pattern

TRANSPORTS = [
    pytest.param("auto", True, "mapped", id="mapped"),
    pytest.param("tcp", True, "tcp", id="tcp-forced"),
    pytest.param("auto", False, "tcp", id="tcp-no-arena"),
]


def check_all(node, expected):
    """`expected[tensor, block]` is (cluster, tensor, block) where not the node's own pattern."""
    for tensor in range(NUM_TENSORS):
        for block in range(NUM_BLOCKS):
            owner, src_tensor, src_block = expected.get((tensor, block), (node.cluster_id, tensor, block))
            assert node.block(tensor, block) == pattern(owner, src_tensor, src_block), (tensor, block)


@pytest.mark.parametrize(("transport", "arena", "actual"), TRANSPORTS)
def test_pulled_blocks_arrive_and_nothing_else_changes(make_node, make_peer, transport, arena, actual):
    peer = make_peer(transport=transport, arena=arena)
    node = make_node()
    assert node.link(2, peer.port) == node.module.LLMStatusCode.LLM_SUCCESS
    assert node.transport(2) == actual
    src, dst = [5, 6, 7, 40, 0, 63], [10, 11, 12, 3, 63, 0]
    node.pull(2, src, dst)
    check_all(node, {(t, d): (2, t, s) for s, d in zip(src, dst, strict=True) for t in range(NUM_TENSORS)})


@pytest.mark.parametrize(("transport", "arena", "actual"), TRANSPORTS)
def test_layer_ranges_select_tensors_on_both_sides(make_node, make_peer, transport, arena, actual):
    peer = make_peer(transport=transport, arena=arena)
    node = make_node()
    node.link(2, peer.port)
    node.pull(2, [1, 2], [8, 9], src_layer_range=range(0, 1), dst_layer_range=range(1, 2))
    expected = {(t + 2, b + 7): (2, t, b) for t in (0, 1) for b in (1, 2)}
    check_all(node, expected)
    node.pull(2, [3], [4], src_layer_range=range(3, 4), dst_layer_range=range(0, 1), tensor_num_per_layer=1)
    check_all(node, {**expected, (0, 4): (2, 3, 3)})


@pytest.mark.parametrize(("transport", "arena", "actual"), TRANSPORTS)
def test_the_listening_side_can_pull_too(make_node, make_peer, transport, arena, actual):
    peer = make_peer(transport=transport)
    node = make_node(arena=arena)
    node.link(2, peer.port)
    assert peer.call("transport", 1) == actual
    assert peer.call("pull", 1, [9], [17]) is None
    assert peer.call("check", 1, 9, 17) == [True] * NUM_TENSORS


def test_bytes_are_read_when_pulled_not_when_linked(make_node, make_peer):
    peer = make_peer()
    node = make_node(listen=True)
    node.link(2, peer.port)
    node.pull(2, [1], [2])
    assert peer.call("pull", 1, [2], [3]) is None  # our block 2 holds the peer's block 1 now
    assert peer.call("check", 2, 1, 3) == [True] * NUM_TENSORS
