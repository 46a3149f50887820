# SPDX-License-Identifier: Apache-2.0
"""The data plane: the API of `llm_datadist`, over CANN's package or over our host implementation.

Start with `load()`; `api.py` says what the connector uses, `settings.py` how a rank starts it.
"""

from __future__ import annotations

from vllm_ascend_pd.datadist.api import DataDist, DataDistModule, Way
from vllm_ascend_pd.datadist.choose import link_counts, link_transport, listening_port, load, require_cann
from vllm_ascend_pd.datadist.config import OPTION_SECRET, OPTION_TRANSPORT
from vllm_ascend_pd.datadist.environment import describe_data_plane
from vllm_ascend_pd.datadist.pair_table import own_device
from vllm_ascend_pd.datadist.ports import bind_first
from vllm_ascend_pd.datadist.settings import (
    DataPlaneSettings,
    bind_thread,
    build_options,
    choose_way,
    link_reserve_bytes,
    start,
)

__all__ = [
    "OPTION_SECRET",
    "OPTION_TRANSPORT",
    "DataDist",
    "DataDistModule",
    "DataPlaneSettings",
    "Way",
    "bind_first",
    "bind_thread",
    "build_options",
    "choose_way",
    "describe_data_plane",
    "link_counts",
    "link_reserve_bytes",
    "link_transport",
    "listening_port",
    "load",
    "own_device",
    "require_cann",
    "start",
]
