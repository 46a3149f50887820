# SPDX-License-Identifier: Apache-2.0
"""What the two sides' data planes have to agree about, beside the model: the part of the handshake's record that only
CANN's needs. Read once in the engine core, at start. Not run on an NPU.

Which variable is compared and which only told follows from what it decides: how bytes travel is compared, how long one
side waits is its own affair.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.ascend.devices import inventory, tls_switch
from vllm_ascend_pd.ascend.host_facts import collect_facts
from vllm_ascend_pd.datadist.api import DataDistModule
from vllm_ascend_pd.datadist.settings import choose_way
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.handshake import UNKNOWN

logger = logging.getLogger(__name__)

# Variable -> what CANN takes when it is not set.
COMPARED: Final = {
    "HCCL_INTRA_ROCE_ENABLE": "0",  # one side would wait on HCCS and the other on RoCE
    "HCCL_RDMA_TC": "132",  # the switch would queue the two directions unlike
    "HCCL_RDMA_SL": "4",
}
TOLD: Final = (
    "HCCL_RDMA_TIMEOUT",
    "HCCL_RDMA_RETRY_CNT",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_DETERMINISTIC",  # has to be one value within a process; the bytes of a pull do not depend on it
    "HCCL_IF_IP",
    "HCCL_SOCKET_IFNAME",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_PORTS: Final = "HCCL_NPU_SOCKET_PORT_RANGE"


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse what is known to break links. Raises PDConfigError."""
    if environ.get(_PORTS, "").strip().lower() == "auto":
        raise PDConfigError(f"{_PORTS} is 'auto', and links fail with it: unset it, or give a range of ports")


def describe_data_plane(
    module: DataDistModule,
    rank_table: str = "",
    environ: Mapping[str, str] = os.environ,
    facts: Callable[..., Any] = collect_facts,
    tls: Callable[[], str] | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """What must be equal on both sides, and what is only told.

    Raises:
        PDConfigError: a setting that cannot work, or a rank table that cannot be read or used.
    """
    way = choose_way(module, bool(rank_table))
    if module.name == "host":
        return {"implementation": module.name}, {}
    check_environment(environ)
    host = facts()
    compared = {
        "implementation": module.name,
        "link_way": way.value,
        "rank_table": _digest_file(rank_table) if rank_table else "none",
        "cann": host.cann or UNKNOWN,
        "vllm_ascend": host.vllm_ascend or UNKNOWN,
        "tls": (tls or read_tls)(),
        **{name: environ.get(name, "").strip() or default for name, default in COMPARED.items()},
    }
    told = {
        "chip": host.chip or UNKNOWN,
        "driver": host.driver or UNKNOWN,
        "torch_npu": host.torch_npu or UNKNOWN,
        **{name: environ[name] for name in TOLD if name in environ},
    }
    return compared, told


def read_tls() -> str:
    """`on`, `off`, or not known: the switch of this process's devices, which must be alike on both sides.

    Raises:
        PDConfigError: some have it on and some off.
    """
    try:
        states = {switch.on for switch in tls_switch(inventory())}
    except PDError as error:
        logger.warning("the TLS switch of the NPUs could not be read: %s", error)
        return UNKNOWN
    if {True, False} <= states:
        raise PDConfigError("TLS is on for some of this host's NPUs and off for others: set it alike with hccn_tool")
    if True in states:
        return "on"
    return "off" if False in states else UNKNOWN


def _digest_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise PDConfigError(f"--pd-rank-table: {path}: {error.strerror}") from error
