# SPDX-License-Identifier: Apache-2.0
"""The data plane: the API of `llm_datadist`, over CANN's package or over our host implementation.

Start with `load()`; `api.py` says what the connector uses.
"""

from __future__ import annotations

from vllm_ascend_pd.datadist.api import DataDist, DataDistModule
from vllm_ascend_pd.datadist.choose import link_counts, link_transport, listening_port, load
from vllm_ascend_pd.datadist.config import OPTION_SECRET, OPTION_TRANSPORT

__all__ = [
    "OPTION_SECRET",
    "OPTION_TRANSPORT",
    "DataDist",
    "DataDistModule",
    "link_counts",
    "link_transport",
    "listening_port",
    "load",
]
