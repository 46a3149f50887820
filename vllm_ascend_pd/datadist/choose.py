# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of `llm_datadist`, and answers what only one of them can.

CANN's package is chosen when it can be imported and a device is there; the connector never asks which it has.
"""

from __future__ import annotations

import glob
from typing import Final

from vllm_ascend_pd.datadist.api import DataDist, DataDistModule
from vllm_ascend_pd.datadist.client import PACKAGE, is_installed, load_cann
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
from vllm_ascend_pd.errors import PDConfigError

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


def require_cann(device: str) -> None:
    """For caches on a device: CANN's is the only one that reaches them.

    Raises:
        PDConfigError: `load()` would choose the host implementation; says which part of CANN is missing.
    """
    if _has_cann():
        return
    missing = f"the package {PACKAGE} (CANN's)" if not is_installed() else f"a device file {_DEVICE_FILES}"
    raise PDConfigError(
        f"--pd-role: the KV caches are on {device}, and {missing} is not there to move them; run `vllm pd doctor`"
    )


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
