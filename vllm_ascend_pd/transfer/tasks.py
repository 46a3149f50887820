# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the workers: plain picklable data inside the connector's step metadata."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.wire import RankAddress


@dataclass(frozen=True)
class PullTask:
    """Pull one request's blocks. Every worker rank gets it and answers it exactly once."""

    request_id: str
    transfer_id: str
    lease_id: str
    control_host: str  # where the lease is kept
    control_port: int
    ranks: tuple[RankAddress, ...]  # of the prefill side; this rank reads from the one with its own tp_rank
    pulls: tuple[GroupPull, ...]
    deadline_s: float  # from now
    reader: str  # the decode engine's epoch: what its leases are held by; the same for its ranks on other hosts


@dataclass(frozen=True)
class DropPeer:
    """The prefill engine behind these ranks has ended (new epoch): force-unlink them."""

    cluster_ids: tuple[int, ...]
