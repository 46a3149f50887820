# SPDX-License-Identifier: Apache-2.0
"""Memory from pools: sizes, keys, and how long it lives (datadist-api.md §4.2)."""

from __future__ import annotations

import ctypes

import pytest

from tests.contract.implementation import (
    DIRECT,
    INVALID_ID,
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    Placement,
    status_of,
)
from tests.unit.datadist.datadist_peer import BLOCK_BYTES, NUM_TENSORS, pattern

PAGE = 1 << 12
INT8 = DataType.DT_INT8
ONE = CacheDesc(1, [2, PAGE // 2], INT8)
ALL = CacheDesc(1, [2, 2 * PAGE], INT8)  # the whole pool
POOL = '{"memory_size": 16384, "page_shift": 12}'
POOLED = {**DIRECT, "llm.MemPoolConfig": POOL}


@pytest.fixture
def pooled(engine):
    """The cache manager of an engine with a device pool of four pages."""
    engine.init(POOLED)
    return engine.cache_manager


def fits(manager, desc=ALL):
    """Whether the pool has room for that."""
    return status_of(lambda: manager.deallocate_cache(manager.allocate_cache(desc))) == "LLM_SUCCESS"


@pytest.mark.parametrize("verb", ["allocate_cache", "allocate_blocks_cache"])
def test_allocation_without_the_pool_of_its_placement_is_invalid(engine, verb):
    engine.init({**DIRECT, "llm.HostMemPoolConfig": POOL})
    allocate = getattr(engine.cache_manager, verb)
    assert status_of(lambda: allocate(ONE)) == "LLM_PARAM_INVALID"
    assert status_of(lambda: allocate(CacheDesc(1, [2, 8], INT8, Placement.HOST))) == "LLM_SUCCESS"


@pytest.mark.parametrize("verb", ["allocate_cache", "allocate_blocks_cache"])
def test_allocated_memory_is_in_pages_apart_and_writable(pooled, verb):
    cache = getattr(pooled, verb)(CacheDesc(3, [3, 5], INT8))
    first, second, third = sorted(cache.tensor_addrs)
    assert second - first >= PAGE
    assert third - second >= PAGE
    assert first % PAGE == 0
    ctypes.memset(third, 7, 15)
    assert ctypes.string_at(second, 15) == bytes(15)
    assert cache.is_blocks_cache == (verb == "allocate_blocks_cache")


def test_sizes_are_rounded_up_to_pages(pooled):
    caches = [pooled.allocate_cache(CacheDesc(1, [1, 1], INT8)) for _ in range(4)]
    assert status_of(lambda: pooled.allocate_cache(CacheDesc(1, [1, 1], INT8))) == "LLM_OUT_OF_MEMORY"
    pooled.deallocate_cache(caches[2])
    assert fits(pooled, ONE)


def test_an_exhausted_pool_keeps_nothing_of_what_failed(pooled):
    assert status_of(lambda: pooled.allocate_cache(CacheDesc(5, [1, PAGE], INT8))) == "LLM_OUT_OF_MEMORY"
    assert status_of(lambda: pooled.allocate_cache(CacheDesc(2, [1, 3 * PAGE], INT8))) == "LLM_OUT_OF_MEMORY"
    assert fits(pooled)


@pytest.mark.parametrize("desc", [CacheDesc(0, [2, 8], INT8), CacheDesc(1, [2, 0], INT8), CacheDesc(1, [1] * 32, INT8)])
def test_a_descriptor_without_size_is_not_allocated(pooled, desc):
    assert status_of(lambda: pooled.allocate_cache(desc)) == "LLM_PARAM_INVALID"
    assert status_of(lambda: pooled.allocate_blocks_cache(desc)) == "LLM_PARAM_INVALID"


@pytest.mark.parametrize(
    ("verb", "args", "error"),
    [
        ("allocate_cache", (None,), AttributeError),
        ("allocate_cache", ("x",), TypeError),
        ("allocate_cache", (ONE, CacheKey(1, 1)), TypeError),
        ("allocate_cache", (ONE, [BlocksCacheKey(1)]), TypeError),
        ("allocate_blocks_cache", (ONE, CacheKey(1, 1)), TypeError),
        ("deallocate_cache", ("x",), TypeError),
        ("deallocate_cache", (None,), AttributeError),
        ("deallocate_blocks_cache", (7,), TypeError),
        ("remove_cache_key", (BlocksCacheKey(1),), TypeError),
        ("remove_cache_key", (None,), TypeError),
    ],
)
def test_pool_calls_check_their_types(pooled, verb, args, error):
    with pytest.raises(error):
        getattr(pooled, verb)(*args)


def test_ids_are_counted_with_those_of_registered_caches(pooled):
    ids = [
        pooled.allocate_cache(ONE).cache_id,
        pooled.register_cache(ONE, [2 << 20]).cache_id,
        pooled.allocate_blocks_cache(ONE).cache_id,
    ]
    assert ids == [1, 2, 3]


@pytest.mark.parametrize(
    "keys",
    [
        [CacheKey(1, 1), CacheKey(1, 2), CacheKey(1, 3)],  # more than slots
        [CacheKey(1, 1), CacheKey(2, 1)],  # the cluster is no part of the name
        [CacheKey(1, INVALID_ID, 0, 5), CacheKey(1, INVALID_ID, 0, 5)],
        [CacheKey(1, 4, 0, 5)],  # by request and by prefix
        [CacheKey(1, 77)],  # bound already
        [CacheKey(1, INVALID_ID, 0, 88)],
    ],
)
def test_keys_that_cannot_be_bound_allocate_nothing(pooled, keys):
    bound = pooled.allocate_cache(ONE, [CacheKey(1, 77), CacheKey(1, INVALID_ID, 0, 88)])
    assert status_of(lambda: pooled.allocate_cache(ONE, keys)) == "LLM_PARAM_INVALID"
    assert [pooled.allocate_cache(ONE).cache_id - bound.cache_id for _ in range(3)] == [1, 2, 3]  # all other pages


def test_request_and_prefix_ids_are_two_maps_and_models_differ(pooled):
    pooled.allocate_cache(ONE, [CacheKey(1, 5), CacheKey(1, 5, 1)])
    pooled.allocate_cache(ONE, (CacheKey(1, INVALID_ID, 0, 5),))
    assert status_of(lambda: pooled.allocate_cache(ONE, [CacheKey(1, 5)])) == "LLM_PARAM_INVALID"


def test_padding_slots_may_repeat(pooled):
    cache = pooled.allocate_cache(ONE, [CacheKey(1, INVALID_ID), CacheKey(1, INVALID_ID)])
    pooled.deallocate_cache(cache)
    assert fits(pooled)  # padding keeps nothing


def test_deallocation_clears_the_addresses_and_may_be_repeated(pooled):
    cache = pooled.allocate_cache(ALL)
    pooled.deallocate_cache(cache)
    assert cache.tensor_addrs == []
    pooled.deallocate_cache(cache)
    assert fits(pooled)


def test_deallocation_of_other_caches_does_nothing(engine, pooled):
    registered = pooled.register_cache(ONE, [2 << 20])
    blocks = pooled.register_blocks_cache(ONE, [2 << 20])
    pooled.deallocate_cache(registered)
    pooled.deallocate_blocks_cache(blocks)
    assert registered.tensor_addrs == blocks.tensor_addrs == [2 << 20]
    assert status_of(lambda: pooled.copy_cache(registered, registered)) == "LLM_SUCCESS"  # it is still there


def test_each_deallocation_has_its_kind(pooled):
    slots, blocks = pooled.allocate_cache(ONE), pooled.allocate_blocks_cache(ONE)
    assert status_of(lambda: pooled.deallocate_cache(blocks)) == "LLM_PARAM_INVALID"
    assert status_of(lambda: pooled.deallocate_blocks_cache(slots)) == "LLM_PARAM_INVALID"


@pytest.mark.parametrize("key", [CacheKey(1, 5), CacheKey(1, INVALID_ID, 0, 5)])
@pytest.mark.parametrize("order", ["key first", "cache first"])
def test_memory_is_free_once_reference_and_keys_are_gone(pooled, key, order):
    cache = pooled.allocate_cache(ALL, [key, CacheKey(1, 6)])
    steps = [
        lambda: pooled.deallocate_cache(cache),
        lambda: pooled.remove_cache_key(key),
        lambda: pooled.remove_cache_key(CacheKey(9, 6)),  # whichever cluster it says
    ]
    if order == "key first":
        steps.reverse()
    for step in steps:
        assert not fits(pooled, ONE)
        step()
    assert fits(pooled)


def test_a_deallocated_cache_is_unknown_here_although_a_key_keeps_it(pooled):
    cache = pooled.allocate_cache(ONE, [CacheKey(1, 5)])
    other = pooled.allocate_cache(ONE)
    pooled.deallocate_cache(cache)
    assert status_of(lambda: pooled.copy_cache(other, cache)) == "LLM_KV_CACHE_NOT_EXIST"
    key = CacheKeyByIdAndIndex(2, 1)
    assert status_of(lambda: pooled.pull_cache(key, cache)) == "LLM_KV_CACHE_NOT_EXIST"
    assert status_of(lambda: pooled.push_cache(key, cache)) == "LLM_KV_CACHE_NOT_EXIST"


def test_blocks_are_freed_at_once_with_their_key(pooled):
    for _ in range(2):
        cache = pooled.allocate_blocks_cache(ALL, BlocksCacheKey(1, 3))
        assert status_of(lambda: pooled.allocate_blocks_cache(ONE, BlocksCacheKey(1, 3))) == "LLM_PARAM_INVALID"
        pooled.deallocate_blocks_cache(cache)
        assert cache.tensor_addrs == []


def test_removing_other_keys_does_nothing(pooled):
    pooled.remove_cache_key(CacheKey(1, 5))
    registered = pooled.register_cache(ONE, [2 << 20], [CacheKey(1, 7)])
    pooled.remove_cache_key(CacheKey(1, 7))
    assert status_of(lambda: pooled.register_cache(ONE, [2 << 20], [CacheKey(1, 7)])) == "LLM_PARAM_INVALID"
    pooled.unregister_cache(registered.cache_id)


def test_a_removed_key_may_be_bound_again(pooled):
    pooled.allocate_cache(ONE, [CacheKey(1, 5)])
    pooled.remove_cache_key(CacheKey(1, 5))
    pooled.allocate_cache(ONE, [CacheKey(1, 5)])


def test_removing_a_key_without_any_pool_is_not_enabled(manager):
    assert status_of(lambda: manager.remove_cache_key(CacheKey(1, 5))) == "LLM_FEATURE_NOT_ENABLED"


def test_unregister_leaves_allocated_caches_alone(pooled):
    cache = pooled.allocate_cache(ALL)
    pooled.unregister_cache(cache.cache_id)
    assert not fits(pooled, ONE)


def test_finalize_frees_everything(engine):
    for _ in range(2):
        engine.init(POOLED)
        assert engine.cache_manager.allocate_cache(ALL, [CacheKey(1, 5)]).cache_id == 1
        engine.finalize()


def test_allocation_after_finalize_fails(engine, pooled):
    cache = pooled.allocate_cache(ONE)
    engine.finalize()
    assert status_of(lambda: pooled.allocate_cache(ONE)) == "LLM_FAILED"
    assert status_of(lambda: pooled.allocate_blocks_cache(ONE)) == "LLM_FAILED"
    assert status_of(lambda: pooled.deallocate_cache(cache)) == "LLM_PARAM_INVALID"
    assert status_of(lambda: pooled.remove_cache_key(CacheKey(1, 1))) == "LLM_PARAM_INVALID"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_pool_memory_is_of_use_on_links_that_are_older(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node(options={"llm.MemPoolConfig": '{"memory_size": 1048576, "page_shift": 12}'})
    node.link(2, peer.port)
    cache = node.manager.allocate_blocks_cache(CacheDesc(NUM_TENSORS, [2, BLOCK_BYTES], INT8))
    node.manager.pull_blocks(BlocksCacheKey(2), cache, [9, 3], [0, 1])
    for tensor, address in enumerate(cache.tensor_addrs):
        assert ctypes.string_at(address, 2 * BLOCK_BYTES) == pattern(2, tensor, 9) + pattern(2, tensor, 3)
    node.manager.push_blocks(BlocksCacheKey(2), cache, [0], [40])
    assert peer.call("check", 2, 9, 40) == [True] * NUM_TENSORS


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_peer_pulls_from_pool_memory(make_node, make_peer, transport):
    node = make_node(listen=True, options={"llm.MemPoolConfig": '{"memory_size": 16777216}'})
    source = node.manager.allocate_blocks_cache(node.desc, BlocksCacheKey(1, 5))
    for tensor, address in enumerate(source.tensor_addrs):
        ctypes.memmove(address + BLOCK_BYTES, pattern(7, tensor, 1), BLOCK_BYTES)
    peer = make_peer(transport=transport)
    assert peer.call("link", 1, node.port) == "LLMStatusCode.LLM_SUCCESS"
    assert peer.call("pull_model", 1, 5, [1], [2]) is None
    assert peer.call("check", 7, 1, 2) == [True] * NUM_TENSORS
