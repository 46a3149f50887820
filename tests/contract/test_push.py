# SPDX-License-Identifier: Apache-2.0
"""What push refuses before it looks for a link, and layers (datadist-api.md §4.5); bytes: test_transports_and_push."""

from __future__ import annotations

import pytest

from tests.contract.implementation import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    status_of,
)

KEY, BY_ID = BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 1)
MIB2 = 2 << 20


@pytest.fixture
def caches(manager):
    """A blocks cache and one of slots; nothing is linked and no memory is behind them."""
    desc = CacheDesc(3, [4, 8], DataType.DT_INT8)
    addresses = [MIB2, 2 * MIB2, 3 * MIB2]
    blocks = manager.register_blocks_cache(desc, addresses, BlocksCacheKey(1))
    return {"blocks": blocks, "slots": manager.register_cache(desc, addresses), None: None, "x": "x"}


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((None, "blocks", [0], [0]), {}, TypeError),
        ((BY_ID, "blocks", [0], [0]), {}, TypeError),
        ((KEY, None, [0], [0]), {}, TypeError),
        ((KEY, "x", [0], [0]), {}, TypeError),
        ((KEY, "blocks", "0", [0]), {}, TypeError),
        ((KEY, "blocks", [0], [-1]), {}, TypeError),
        ((KEY, "blocks", [0], [0]), {"src_layer_range": (0, 1)}, TypeError),
        ((KEY, "blocks", [0], [0]), {"tensor_num_per_layer": "1"}, TypeError),
        ((KEY, "blocks", [0], [0]), {"tensor_num_per_layer": -1}, ValueError),
    ],
)
def test_push_blocks_checks_its_types(manager, caches, args, kwargs, error):
    key, name, src, dst = args
    with pytest.raises(error):
        manager.push_blocks(key, caches[name], src, dst, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((None, "slots"), {}, TypeError),
        ((KEY, "slots"), {}, TypeError),
        ((CacheKey(1, 1), "slots"), {}, TypeError),
        ((BY_ID, None), {}, TypeError),
        ((BY_ID, "slots", -1), {}, ValueError),
        ((BY_ID, "slots", "0"), {}, TypeError),
        ((BY_ID, "slots"), {"size": "1"}, TypeError),
        ((BY_ID, "slots"), {"dst_layer_range": 1}, TypeError),
        ((BY_ID, "slots"), {"tensor_num_per_layer": 2**32}, ValueError),
    ],
)
def test_push_cache_checks_its_types(manager, caches, args, kwargs, error):
    key, name, *rest = args
    with pytest.raises(error):
        manager.push_cache(key, caches[name], *rest, **kwargs)


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, caches: manager.push_blocks(KEY, caches["slots"], [0], [0]),
        lambda manager, caches: manager.push_blocks(KEY, caches["blocks"], [0], []),
        lambda manager, caches: manager.push_blocks(KEY, caches["blocks"], [0], [0], tensor_num_per_layer=0),
        lambda manager, caches: manager.push_blocks(KEY, caches["blocks"], [0], [0], range(1, 1)),
        lambda manager, caches: manager.push_cache(BY_ID, caches["blocks"]),
        lambda manager, caches: manager.push_cache(BY_ID, caches["slots"], size=5),
    ],
)
def test_push_refuses_bad_arguments_before_the_link(manager, caches, call):
    assert status_of(lambda: call(manager, caches)) == "LLM_PARAM_INVALID"


def test_push_without_a_link_is_not_linked(manager, caches):
    assert status_of(lambda: manager.push_blocks(KEY, caches["blocks"], [0], [0])) == "LLM_NOT_YET_LINK"
    assert status_of(lambda: manager.push_cache(BY_ID, caches["slots"])) == "LLM_NOT_YET_LINK"


def test_push_of_an_unknown_cache_does_not_exist(manager, caches):
    manager.unregister_cache(caches["slots"].cache_id)
    assert status_of(lambda: manager.push_cache(BY_ID, caches["slots"])) == "LLM_KV_CACHE_NOT_EXIST"


def test_push_counts_layers(make_node):
    """To itself: three tensors are no layer of four, no multiple of two, three of one."""
    node = make_node(listen=True)
    desc = CacheDesc(3, [4, 8], DataType.DT_INT8)
    cache = node.manager.register_blocks_cache(desc, node.addresses[:3], BlocksCacheKey(1, 5))
    node.link(1, node.port)

    def push(per_layer):
        call = node.manager.push_blocks
        return status_of(lambda: call(BlocksCacheKey(1, 5), cache, [0], [1], tensor_num_per_layer=per_layer))

    assert [push(4), push(2), push(1)] == ["LLM_SUCCESS", "LLM_PARAM_INVALID", "LLM_SUCCESS"]
    assert node.block(2, 0)[8:16] == node.block(2, 0)[:8]
