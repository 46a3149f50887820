# SPDX-License-Identifier: Apache-2.0
"""Who takes part in `bench transfer`, and with which settings. Data only.

A family is one competitor; where its best setting needs another process, the family has several contenders and the
ratios take the best of them for each piece size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LIMIT, RAW, MAPPED, TCP = "copy-limit", "raw-tcp", "ours-mapped", "ours-tcp"
NIXL, NIXL_TCP, MOONCAKE, GLOO = "nixl", "nixl-tcp", "mooncake", "gloo"


@dataclass(frozen=True)
class Spec:
    """One contender: two processes (source, reader), or one when nothing has to be sent."""

    name: str
    family: str
    label: str
    module: str  # below vllm_ascend_pd.bench.transfer.contenders
    is_peer: bool = False  # runs in the environment of --peers-python
    num_processes: int = 2
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


# UCX_TLS=tcp leaves UCX's own loopback choice ("self") out on purpose: source and reader are two processes.
# Mooncake: more than 1024 pieces in a batch fail without the raised queue (peers.md §4.1).
_MOONCAKE_ENV: Final = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_LOG_LEVEL": "ERROR",
}

SPECS: Final = (
    Spec(LIMIT, LIMIT, "copy limit", "limit", num_processes=1),
    Spec(MAPPED, MAPPED, "ours, mapped", "ours", options={"transport": "mapped"}),
    Spec(TCP, TCP, "ours, TCP", "ours", options={"transport": "tcp"}),
    Spec(RAW, RAW, "raw TCP stream", "raw", options={"contiguous": "1"}),
    Spec(NIXL, NIXL, "NIXL, UCX auto", "nixl", True, options={"reader_progress": "1"}),
    Spec("nixl-np", NIXL, "NIXL, UCX auto, reader polls", "nixl", True, options={"reader_progress": "0"}),
    Spec("nixl-mt", NIXL, "NIXL, UCX auto, threads", "nixl", True, options={"reader_progress": "1", "threads": "all"}),
    Spec(NIXL_TCP, NIXL_TCP, "NIXL, UCX tcp", "nixl", True, 2, {"reader_progress": "1"}, {"UCX_TLS": "tcp"}),
    Spec(
        "nixl-tcp-np", NIXL_TCP, "NIXL, UCX tcp, reader polls", "nixl", True, 2, {"reader_progress": "0"},
        {"UCX_TLS": "tcp"},
    ),
    Spec(MOONCAKE, MOONCAKE, "Mooncake TE, TCP", "mooncake", True, environment=_MOONCAKE_ENV),
    Spec(
        "mooncake-pool", MOONCAKE, "Mooncake TE, TCP, pooled", "mooncake", True,
        environment={**_MOONCAKE_ENV, "MC_TCP_ENABLE_CONNECTION_POOL": "1"},
    ),
    Spec(GLOO, GLOO, "torch gloo", "gloo", True, environment={"GLOO_SOCKET_IFNAME": "lo"}),
)  # fmt: skip

# name of a ratio -> (family above, family below)
RATIOS: Final = {
    "pull_mapped_vs_copy_limit": (MAPPED, LIMIT),
    "pull_mapped_vs_nixl": (MAPPED, NIXL),
    "pull_mapped_vs_mooncake": (MAPPED, MOONCAKE),
    "pull_tcp_vs_raw": (TCP, RAW),
    "pull_tcp_vs_nixl_tcp": (TCP, NIXL_TCP),
}
