# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of `llm_datadist`, and answers what only one of them can.

CANN's package is chosen when it can be imported and a device is there; the connector never asks which it has.
"""

from __future__ import annotations

import glob
from typing import Final

from vllm_ascend_pd.datadist.api import DataDist, DataDistModule
from vllm_ascend_pd.datadist.client import is_installed, load_cann
from vllm_ascend_pd.datadist.config import LLMConfig
from vllm_ascend_pd.datadist.host.llm_datadist import LLMDataDist
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.datadist.types import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMRole,
    Placement,
)

_DEVICE_FILES: Final = "/dev/davinci[0-9]*"


def load(prefer: str = "auto") -> DataDistModule:
    """`auto`: CANN's where it can be imported and a device is there, else host. Or `host`, or `cann`.

    Raises ImportError when `cann` is asked for and cannot be imported, ValueError for other names.
    """
    if prefer not in ("auto", "host", "cann"):
        raise ValueError(f"prefer must be auto, host or cann, not {prefer!r}")
    if prefer == "cann" or (prefer == "auto" and _has_cann()):
        return load_cann()
    return DataDistModule(
        name="host",
        LLMDataDist=LLMDataDist,
        LLMConfig=LLMConfig,
        LLMRole=LLMRole,
        CacheDesc=CacheDesc,
        BlocksCacheKey=BlocksCacheKey,
        DataType=DataType,
        Placement=Placement,
        LLMClusterInfo=LLMClusterInfo,
        LLMStatusCode=LLMStatusCode,
        LLMException=LLMException,
    )


def _has_cann() -> bool:
    return is_installed() and bool(glob.glob(_DEVICE_FILES))


def listening_port(datadist: DataDist) -> int | None:
    """The port that a host engine listens on (useful after port 0); None when it does not, or for CANN's."""
    port: int | None = getattr(datadist, "listen_port", None)
    return port


def link_transport(datadist: DataDist, cluster_id: int) -> str:
    """How bytes come from that peer: `mapped` or `tcp`; `cann` when CANN moves them.

    Raises LLMException(LLM_NOT_YET_LINK) from the host implementation.
    """
    if isinstance(datadist, LLMDataDist):
        return datadist.link_transport(cluster_id)
    return "cann"


def link_counts(datadist: DataDist, cluster_id: int) -> dict[str, int]:
    """What that link's transfers took so far, for /pd/status; empty for CANN's.

    Raises LLMException(LLM_NOT_YET_LINK) from the host implementation.
    """
    return datadist.link_counts(cluster_id) if isinstance(datadist, LLMDataDist) else {}
