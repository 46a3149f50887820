# SPDX-License-Identifier: Apache-2.0
"""Registration (datadist-api.md §4.1); no memory is touched, addresses are made up."""

from __future__ import annotations

import pytest

from tests.contract.implementation import (
    INVALID_ID,
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMException,
    LLMStatusCode,
    Placement,
    only,
)

MIB2 = 2 << 20
DESC = CacheDesc(2, [4, 8], DataType.DT_FLOAT16)
HOST = CacheDesc(2, [4, 8], DataType.DT_FLOAT16, Placement.HOST)
ADDRS = [MIB2, 2 * MIB2]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((DESC, []), LLMException),
        ((DESC, [MIB2]), LLMException),
        ((DESC, [MIB2, 0]), LLMException),
        ((DESC, (MIB2, "1")), TypeError),
        ((DESC, "x"), TypeError),
        (("x", ADDRS), TypeError),
        ((None, ADDRS), AttributeError),
        ((DESC, ADDRS, CacheKey(1, 2)), TypeError),
        ((DESC, ADDRS, None, 1), TypeError),
        ((CacheDesc(2, [4, 0], DataType.DT_INT8), ADDRS), LLMException),
        ((CacheDesc(2, [1] * 32, DataType.DT_INT8), ADDRS), LLMException),
        pytest.param((DESC, [MIB2, 2 * MIB2 + 4096]), LLMException, marks=only("host", "CANN says so when it links")),
        ((DESC, [MIB2, -MIB2]), LLMException),
        ((HOST, [1, 0], None, True), LLMException),
    ],
)
def test_bad_blocks_registration_is_refused(manager, args, error):
    with pytest.raises(error) as failure:
        manager.register_blocks_cache(*args)
    if error is LLMException:
        assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@only("host", "CANN says so when it links: test_hixl")
def test_misaligned_base_is_named(manager):
    with pytest.raises(LLMException, match=r"tensor 1: base 0x401000 is not 2 MiB-aligned"):
        manager.register_blocks_cache(DESC, [MIB2, 2 * MIB2 + 4096])


@pytest.mark.parametrize(
    ("desc", "accessible"),
    [(HOST, None), (HOST, True), (HOST, False), (DESC, False)],
)
def test_only_served_device_memory_must_be_aligned(manager, desc, accessible):
    cache = manager.register_blocks_cache(desc, [1, 3], None, accessible)
    assert cache.tensor_addrs == [1, 3]


def test_caches_count_from_one_and_ids_are_not_used_again(manager):
    first = manager.register_blocks_cache(DESC, ADDRS, BlocksCacheKey(1, 0))
    second = manager.register_cache(DESC, ADDRS)
    assert (first.cache_id, second.cache_id) == (1, 2)
    assert (first.is_blocks_cache, second.is_blocks_cache) == (True, False)
    assert str(first) == "Cache(cache_id = 1, device_tensor_addrs = 2, is_blocks_cache = True)"
    manager.unregister_cache(2)
    manager.unregister_cache(2)  # unknown: fine
    assert manager.register_cache(DESC, ADDRS).cache_id == 3


def test_each_model_id_names_one_cache(manager):
    first = manager.register_blocks_cache(DESC, ADDRS, BlocksCacheKey(1, 0))
    manager.register_blocks_cache(DESC, ADDRS, BlocksCacheKey(1, 1))
    with pytest.raises(LLMException, match="model_id 0 already names cache 1") as failure:
        manager.register_blocks_cache(DESC, ADDRS, BlocksCacheKey(9, 0))  # the cluster is no part of the name
    assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    manager.unregister_cache(first.cache_id)
    manager.register_blocks_cache(DESC, ADDRS, BlocksCacheKey(1, 0))


def test_register_does_not_mark_the_callers_descriptor(manager):
    manager.register_blocks_cache(DESC, ADDRS)
    assert not manager.register_cache(DESC, ADDRS).is_blocks_cache


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((DESC, (MIB2, 2 * MIB2)), TypeError),  # a list, here
        ((DESC, [MIB2]), LLMException),
        ((DESC, []), LLMException),
        ((DESC, [MIB2, 0]), LLMException),
        ((DESC, ADDRS, [BlocksCacheKey(1)]), TypeError),
        ((DESC, ADDRS, [CacheKey(1, index) for index in range(5)]), LLMException),
        ((DESC, ADDRS, [CacheKey(1, 3), CacheKey(2, 3)]), LLMException),
        ((None, ADDRS), AttributeError),
    ],
)
def test_bad_cache_registration_is_refused(manager, args, error):
    with pytest.raises(error):
        manager.register_cache(*args)


def test_padding_keys_may_repeat(manager):
    padding = CacheKey(1, INVALID_ID)
    manager.register_cache(DESC, ADDRS, (padding, CacheKey(1, 7), padding))
    with pytest.raises(LLMException, match="req_id 7"):
        manager.register_cache(DESC, ADDRS, (CacheKey(1, 7),))


def test_cache_table_is_limited_to_one_mib(manager):
    big = CacheDesc(100_000, [4, 8], DataType.DT_FLOAT16)
    manager.register_blocks_cache(big, [MIB2] * 100_000)
    with pytest.raises(LLMException, match="at most 1048576 fit"):
        manager.register_blocks_cache(big, [MIB2] * 100_000)
    manager.register_blocks_cache(big, [MIB2] * 100_000, None, False)  # not in the table
