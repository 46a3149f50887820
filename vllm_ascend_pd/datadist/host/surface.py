# SPDX-License-Identifier: Apache-2.0
"""The top-level names of `llm_datadist`, as the host implementation has them (§0).

Names of the old mode (V1) are an ImportError, any other unknown name an AttributeError.
"""

from __future__ import annotations

from typing import Final, NoReturn

from vllm_ascend_pd.datadist.config import LLMConfig
from vllm_ascend_pd.datadist.host.async_task import CacheTask
from vllm_ascend_pd.datadist.host.cache_manager import CacheManager
from vllm_ascend_pd.datadist.host.llm_datadist import LLMDataDist
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode, Status
from vllm_ascend_pd.datadist.transfer_types import (
    LayerSynchronizer,
    MemInfo,
    Memtype,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from vllm_ascend_pd.datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMRole,
    Placement,
    RegisterMemStatus,
)

LlmConfig = LLMConfig

V1_NAMES: Final = ("KvCache", "KvCacheManager", "Tensor", "TensorDesc")

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "DataType",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]


def __getattr__(name: str) -> NoReturn:
    if name in V1_NAMES:
        raise ImportError(f"{name} belongs to the old mode (llm_datadist_v1), which the host implementation lacks")
    raise AttributeError(f"Module 'llm_datadist' has no attribute '{name}'")
