# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CANN's `llm_datadist`, written from the interface's facts; see ../README.md. Not CANN's."""

import os

from llm_datadist.configs import LLMClusterInfo, LlmConfig, LLMRole
from llm_datadist.data_type import DataType
from llm_datadist.status import LLMException, LLMStatusCode, Status
from llm_datadist.v2.llm_datadist import LLMDataDist
from llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")
LLMConfig = LlmConfig

__all__ = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
]
v2_list = list(__all__)
_V1 = ("TensorDesc", "Tensor", "KvCacheManager")
__all__ += _V1  # so that `import *` fails without the old mode's package, as it does there


def __getattr__(name):
    if name in _V1:
        raise ImportError(f"{name} is in llm_datadist_v1, which is not installed")
    raise AttributeError(f"Module 'llm_datadist' has no attribute '{name}'")
