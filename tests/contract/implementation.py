# SPDX-License-Identifier: Apache-2.0
"""The implementation under test: every name that the suite uses comes from here.

One per run, because the real package is process-wide: `PD_DATADIST=host` (default) is ours; further ones are added
to `_MODULES`. Peers in other processes inherit the choice.
"""

from __future__ import annotations

import importlib
import os

_MODULES = {"host": "vllm_ascend_pd.datadist.host.surface"}

NAME = os.environ.get("PD_DATADIST", "host")
module = importlib.import_module(_MODULES[NAME])

BlocksCacheKey = module.BlocksCacheKey
Cache = module.Cache
CacheDesc = module.CacheDesc
CacheKey = module.CacheKey
CacheKeyByIdAndIndex = module.CacheKeyByIdAndIndex
DataType = module.DataType
LLMClusterInfo = module.LLMClusterInfo
LLMConfig = module.LLMConfig
LLMDataDist = module.LLMDataDist
LLMException = module.LLMException
LLMRole = module.LLMRole
LLMStatusCode = module.LLMStatusCode
LayerSynchronizer = module.LayerSynchronizer
MemInfo = module.MemInfo
Memtype = module.Memtype
Placement = module.Placement
RegisterMemStatus = module.RegisterMemStatus
Status = module.Status
TransferConfig = module.TransferConfig
TransferWithCacheKeyConfig = module.TransferWithCacheKeyConfig

INVALID_ID = 2**64 - 1
DIRECT = {"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}


def status_of(call):
    """How a call ended that raises LLMException, by name."""
    try:
        call()
    except LLMException as error:
        return error.status_code.name
    return "LLM_SUCCESS"
