# SPDX-License-Identifier: Apache-2.0
"""What a pull refuses, with which code (datadist-api.md §4.3, §4.9); one linked peer for all cases."""

from __future__ import annotations

import ctypes

import pytest

from tests.contract.implementation import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
    status_of,
)
from tests.unit.datadist.datadist_peer import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    NUM_TENSORS,
    TENSOR_BYTES,
    Node,
    Peer,
    pattern,
)

INT8 = DataType.DT_INT8


@pytest.fixture(scope="module", params=["auto", "tcp"])
def linked(request):
    peer = Peer(cluster_id=2, extra_caches=True, transport=request.param)
    node = Node(cluster_id=1, listen=False)
    addrs = node.addresses
    register = node.manager.register_blocks_cache
    node.other_shape = register(CacheDesc(NUM_TENSORS, [NUM_BLOCKS, BLOCK_BYTES // 2], INT8), addrs)
    node.few_tensors = register(CacheDesc(3, [NUM_BLOCKS, BLOCK_BYTES], INT8), addrs[:3])
    node.closed = register(node.desc, addrs, None, False)
    node.slots = node.manager.register_cache(CacheDesc(NUM_TENSORS, [4, TENSOR_BYTES // 4], INT8), addrs)
    node.two_slots = node.manager.register_cache(CacheDesc(2, [4, TENSOR_BYTES // 4], INT8), addrs[:2])
    assert node.link(2, peer.port) == LLMStatusCode.LLM_SUCCESS
    node.late = register(node.desc, addrs)
    yield node
    node.datadist.finalize()
    peer.kill()


K = BlocksCacheKey


@pytest.mark.parametrize(
    ("args", "kwargs", "status"),
    [
        ((K(1), "cache", [0], [0]), {}, "LLM_PARAM_INVALID"),  # this process
        ((K(77), "cache", [0], [0]), {}, "LLM_NOT_YET_LINK"),
        ((K(2, 5), "cache", [0], [0]), {}, "LLM_KV_CACHE_NOT_EXIST"),
        ((K(2), "unknown", [0], [0]), {}, "LLM_KV_CACHE_NOT_EXIST"),
        ((K(2), "late", [0], [0]), {}, "LLM_NOT_YET_LINK"),  # registered after the link
        ((K(2), "closed", [0], [0]), {}, "LLM_PARAM_INVALID"),  # not accessible here
        ((K(2, 1), "cache", [0], [0]), {}, "LLM_PARAM_INVALID"),  # not accessible there
        ((K(2), "cache", [NUM_BLOCKS], [0]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [0], [NUM_BLOCKS]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [62, 63, 64], [0, 1, 2]), {}, "LLM_PARAM_INVALID"),  # inside a run
        ((K(2), "cache", [0, 1, 2], [62, 63, 64]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [0, 1], [0]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [0], [0, 1]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [], [0]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [0], []), {}, "LLM_PARAM_INVALID"),
        ((K(2), "slots", [0], [0]), {}, "LLM_PARAM_INVALID"),  # not a blocks cache
        ((K(2), "other_shape", [0], [0]), {}, "LLM_PARAM_INVALID"),
        ((K(2), "few_tensors", [0], [0]), {}, "LLM_PARAM_INVALID"),
        ((CacheKeyByIdAndIndex(2, 1), "cache", [0], [0]), {}, "LLM_PARAM_INVALID"),  # src must be empty
        ((CacheKeyByIdAndIndex(2, 1), "cache", [], [0]), {}, "LLM_PARAM_INVALID"),  # the remote one is blocks
        ((CacheKeyByIdAndIndex(2, 99), "cache", [], [0]), {}, "LLM_KV_CACHE_NOT_EXIST"),
        ((CacheKeyByIdAndIndex(2, 3, 4), "cache", [], [0]), {}, "LLM_PARAM_INVALID"),  # batch index
        ((CacheKey(2, 99), "cache", [], [0]), {}, "LLM_KV_CACHE_NOT_EXIST"),
        ((CacheKey(2, 2**64 - 1, 0, 5), "cache", [], [0]), {}, "LLM_KV_CACHE_NOT_EXIST"),  # prefix
        ((CacheKey(2, 11, 0, 5), "cache", [], [0]), {}, "LLM_PARAM_INVALID"),  # both
        ((CacheKey(2, 11), "cache", [], list(range(40))), {}, "LLM_PARAM_INVALID"),  # more blocks than bytes
        ((K(2), "cache", [0], [0]), {"src_layer_range": range(2, 3)}, "LLM_PARAM_INVALID"),  # count
        ((K(2), "cache", [0], [0]), {"dst_layer_range": range(0, 1)}, "LLM_PARAM_INVALID"),
        (
            (K(2), "cache", [0], [0]),
            {"src_layer_range": range(0, 1), "dst_layer_range": range(0, 2)},
            "LLM_PARAM_INVALID",
        ),
        (
            (K(2), "cache", [0], [0]),
            {"src_layer_range": range(2, 3), "dst_layer_range": range(0, 1)},
            "LLM_PARAM_INVALID",
        ),
        (
            (K(2), "cache", [0], [0]),
            {"src_layer_range": range(0, 1), "dst_layer_range": range(2, 3)},
            "LLM_PARAM_INVALID",
        ),
        ((K(2), "few_tensors", [0], [0]), {"src_layer_range": range(0, 1)}, "LLM_PARAM_INVALID"),  # 3 % 2
        ((K(2), "cache", [0], [0]), {"src_layer_range": range(0, 2, 2)}, "LLM_PARAM_INVALID"),
        ((K(2), "cache", [0], [0]), {"tensor_num_per_layer": 0}, "LLM_PARAM_INVALID"),
    ],
)
def test_refused_pull_says_why_and_moves_nothing(linked, args, kwargs, status):
    key, name, src, dst = args
    cache = Cache(12345, linked.desc, [1], True) if name == "unknown" else getattr(linked, name)
    with pytest.raises(LLMException) as failure:
        linked.manager.pull_blocks(key, cache, src, dst, **kwargs)
    assert failure.value.status_code is LLMStatusCode[status], failure.value
    assert str(LLMStatusCode[status]) in str(failure.value)
    for block in (0, 1, 2, 62, 63):
        assert linked.block(0, block) == pattern(1, 0, block)
    linked.pull(2, [5], [5])  # the link is still good
    linked.fill()


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((None, "cache", [0], [0]), {}, TypeError),
        ((K(2), None, [0], [0]), {}, TypeError),
        ((K(2), "cache", "0", [0]), {}, TypeError),
        ((K(2), "cache", [0], [0.5]), {}, TypeError),
        ((K(2), "cache", [-1], [0]), {}, TypeError),
        ((K(2), "cache", [0], [-1]), {}, TypeError),
        ((K(2), "cache", [0], [0]), {"src_layer_range": (0, 1)}, TypeError),
        ((K(2), "cache", [0], [0]), {"tensor_num_per_layer": "2"}, TypeError),
        ((K(2), "cache", [0], [0]), {"tensor_num_per_layer": -1}, ValueError),
    ],
)
def test_wrong_types_never_reach_the_engine(linked, args, kwargs, error):
    key, name, src, dst = args
    with pytest.raises(error):
        linked.manager.pull_blocks(key, name and linked.cache, src, dst, **kwargs)


def test_tuples_are_blocks_too_and_unknown_keywords_are_ignored(linked):
    linked.manager.pull_blocks(K(2), linked.cache, (3,), (4,), something_else=1)
    assert linked.block(0, 4) == pattern(2, 0, 3)
    linked.fill()


def test_a_longer_request_than_the_engine_takes_is_refused(linked, monkeypatch):
    monkeypatch.setattr("vllm_ascend_pd.datadist.host.runs._MAX_REQUEST_WORDS", NUM_TENSORS + 3)
    linked.pull(2, [1, 2], [1, 2])  # one run
    with pytest.raises(LLMException, match="exceed one request"):
        linked.pull(2, [1, 3], [1, 2])
    linked.fill()


def slot_bytes(cluster_id, tensor, slot):
    blocks = NUM_BLOCKS // 4
    return b"".join(pattern(cluster_id, tensor, block) for block in range(slot * blocks, (slot + 1) * blocks))


def local_slot(node, tensor, slot):
    size = TENSOR_BYTES // 4
    return ctypes.string_at(node.addresses[tensor] + slot * size, size)


def test_pull_cache_moves_one_slot_or_its_head(linked):
    linked.manager.pull_cache(CacheKeyByIdAndIndex(2, 3, 1), linked.slots, 2)
    for tensor in range(NUM_TENSORS):
        assert local_slot(linked, tensor, 2) == slot_bytes(2, tensor, 1)
        assert local_slot(linked, tensor, 1) == slot_bytes(1, tensor, 1)
    linked.manager.pull_cache(CacheKeyByIdAndIndex(2, 3, 3), linked.slots, 0, 100)
    assert local_slot(linked, 0, 0) == slot_bytes(2, 0, 3)[:100] + slot_bytes(1, 0, 0)[100:]
    linked.manager.pull_cache(
        CacheKeyByIdAndIndex(2, 3, 0), linked.two_slots, 3, src_layer_range=range(1, 2), dst_layer_range=range(0, 1)
    )
    assert local_slot(linked, 0, 3) == slot_bytes(2, 2, 0)
    linked.fill()


@pytest.mark.parametrize(
    ("key", "name", "args", "error"),
    [
        (CacheKeyByIdAndIndex(2, 3), "cache", (), LLMException),
        (CacheKeyByIdAndIndex(2, 3), "slots", (4,), LLMException),
        (CacheKeyByIdAndIndex(2, 3, 4), "slots", (0,), LLMException),
        (CacheKeyByIdAndIndex(2, 3), "slots", (0, 0), LLMException),
        (CacheKeyByIdAndIndex(2, 3), "slots", (0, TENSOR_BYTES // 4 + 1), LLMException),
        (CacheKeyByIdAndIndex(2, 3), "two_slots", (0,), LLMException),
        (CacheKeyByIdAndIndex(2, 1), "slots", (0,), LLMException),
        (CacheKeyByIdAndIndex(2, 3), "slots", (-1,), ValueError),
        (CacheKeyByIdAndIndex(2, 3), "slots", (0, "1"), TypeError),
        (CacheKey(2, 11), "slots", (), TypeError),
        (BlocksCacheKey(2), "slots", (), TypeError),
    ],
)
def test_refused_pull_cache(linked, key, name, args, error):
    with pytest.raises(error):
        linked.manager.pull_cache(key, getattr(linked, name), *args)


@pytest.mark.parametrize("key", [CacheKeyByIdAndIndex(2, 3, 1), CacheKey(2, 11)])
def test_pull_blocks_cuts_a_slot_into_blocks(linked, key):
    """Key (req 11) names slot 1. The real engine reads slot 0 here; ours honours the index."""
    linked.manager.pull_blocks(key, linked.cache, [], [9, 4, 60])
    for tensor in range(NUM_TENSORS):
        for index, block in enumerate((9, 4, 60)):
            assert linked.block(tensor, block) == pattern(2, tensor, NUM_BLOCKS // 4 + index)
    linked.fill()


UNKNOWN = 4242  # a local cache id


@pytest.mark.parametrize(
    ("key", "cache", "src", "dst", "status"),
    [
        (K(1), UNKNOWN, [0], [0], "LLM_PARAM_INVALID"),  # own cluster: before the local cache
        (K(77), UNKNOWN, [0], [0], "LLM_KV_CACHE_NOT_EXIST"),  # the local cache: before the link
        (K(77), "cache", [0, 1], [0], "LLM_PARAM_INVALID"),  # lengths: before the link
        (K(77), "cache", [0], [NUM_BLOCKS], "LLM_NOT_YET_LINK"),  # the link: before the local blocks
        (K(2, 9), "cache", [0], [NUM_BLOCKS], "LLM_PARAM_INVALID"),  # local blocks: before the remote cache
        (K(2, 9), "cache", [NUM_BLOCKS], [0], "LLM_KV_CACHE_NOT_EXIST"),  # the remote cache: before its blocks
    ],
)
def test_pull_reports_the_first_of_several_faults(linked, key, cache, src, dst, status):
    target = Cache(UNKNOWN, linked.desc, [1], True) if cache == UNKNOWN else getattr(linked, cache)
    assert status_of(lambda: linked.manager.pull_blocks(key, target, src, dst)) == status


def test_layer_checks_come_before_the_link(linked):
    ranges = {"dst_layer_range": range(2, 3)}
    pull = linked.manager.pull_blocks
    assert status_of(lambda: pull(K(77), linked.cache, [0], [0], **ranges)) == "LLM_PARAM_INVALID"
    by_id = CacheKeyByIdAndIndex(77, 3)
    assert status_of(lambda: linked.manager.pull_cache(by_id, linked.slots, 4)) == "LLM_PARAM_INVALID"
    assert status_of(lambda: linked.manager.pull_cache(by_id, linked.slots, 3)) == "LLM_NOT_YET_LINK"


def test_a_pull_takes_no_key_away(linked):
    for _ in range(2):
        linked.manager.pull_blocks(CacheKey(2, 11), linked.cache, [], [4])
    assert linked.block(0, 4) == pattern(2, 0, NUM_BLOCKS // 4)
    linked.fill()


@pytest.mark.parametrize("cache_id", [0, -1])
def test_an_id_that_is_none_means_the_key_of_request_0(linked, cache_id):
    linked.manager.pull_blocks(CacheKeyByIdAndIndex(2, cache_id, 0), linked.cache, [], [4])
    assert linked.block(0, 4) == pattern(2, 0, 2 * NUM_BLOCKS // 4)
    linked.fill()


def test_layers_of_another_width_are_selected(linked):
    ranges = {"src_layer_range": range(1, 3), "dst_layer_range": range(2, 4)}
    linked.manager.pull_blocks(K(2), linked.cache, [7], [8], tensor_num_per_layer=1, **ranges)
    assert [linked.block(tensor, 8) == pattern(2, tensor - 1, 7) for tensor in (2, 3)] == [True, True]
    assert linked.block(1, 8) == pattern(1, 1, 8)
    linked.fill()
