# SPDX-License-Identifier: Apache-2.0
"""The table of caches: what outlives what."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.datadist.host.llm_datadist import LLMDataDist
from vllm_ascend_pd.datadist.host.table_keys import Keys
from vllm_ascend_pd.datadist.status import LLMException
from vllm_ascend_pd.datadist.types import CacheDesc, DataType, LLMRole

MIB2 = 2 << 20
DESC = CacheDesc(2, [4, 8], DataType.DT_FLOAT16)
ADDRS = [MIB2, 2 * MIB2]


@pytest.fixture
def table():
    instance = LLMDataDist(LLMRole.MIX, 1)
    instance.init({"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"})
    yield instance._engine.caches
    instance.finalize()


def test_unregister_waits_for_a_copy_that_touches_the_memory(table):
    cache = table.register(DESC, ADDRS, is_blocks=True, keys=Keys(), accessible=None)
    with table.use(cache.cache_id):
        table.unregister(cache.cache_id, 0.0)  # waited out: logged, forgotten all the same
    with pytest.raises(LLMException), table.use(cache.cache_id):
        pass


def test_pool_memory_that_a_copy_still_touches_is_not_given_back(table):
    cache = table.register(DESC, ADDRS, is_blocks=True, keys=Keys(), accessible=None, is_pooled=True)
    with table.use(cache.cache_id):
        assert table.deallocate(cache.cache_id, 0.0, with_keys=True) is None
    other = table.register(DESC, ADDRS, is_blocks=True, keys=Keys(), accessible=None, is_pooled=True)
    assert table.deallocate(other.cache_id, 0.0, with_keys=True) is other
