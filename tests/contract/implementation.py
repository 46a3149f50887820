# SPDX-License-Identifier: Apache-2.0
"""The implementation under test: every name that the suite uses comes from here.

One per run, because the package is process-wide: `PD_DATADIST=host` (default) is ours, `stub` the stand-in of CANN's
package (`tests/standin`). Peers in other processes inherit the choice. Where the two differ on purpose a test says so
with `differs` or `only`, and why.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

_MODULES = {"host": "vllm_ascend_pd.datadist.host.surface", "stub": "llm_datadist"}

NAME = os.environ.get("PD_DATADIST", "host")
if NAME == "stub":
    sys.path.insert(0, str(Path(__file__).parents[1] / "standin"))
module = importlib.import_module(_MODULES[NAME])
IS_STUB = NAME == "stub"
RELEASE = os.environ.get("STANDIN_CANN", "9.1.0")  # whose surface the stand-in shows


def differs(host, stub, why):
    """What is expected here. `why` says which fact makes the stand-in another one than our engine."""
    assert why
    return stub if IS_STUB else host


def only(name, why):
    """Marks a test of what the other implementation does not have."""
    return pytest.mark.skipif(name != NAME, reason=f"{name} only: {why}")


def since(release, why):
    """Marks a test of what the stand-in has from that release of CANN on."""
    return pytest.mark.skipif(IS_STUB and release > RELEASE, reason=f"CANN {release} and later: {why}")


def listening_port(engine):
    """Where an engine listens that was told port 0; neither interface nor CANN's package has that."""
    return engine.standin_port if IS_STUB else engine.listen_port


def count_running_calls(engine):
    """Calls that an engine is in; asked of its inside, because no interface tells."""
    inner = engine._inner if IS_STUB else engine
    return inner._engine._running


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
