# SPDX-License-Identifier: Apache-2.0
"""What travels with steps: tasks to the workers, answers back, and each rank's address at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask
from vllm_ascend_pd.wire import RankAddress


@dataclass
class DataDistMetadata(KVConnectorMetadata):
    """Scheduler half to every worker rank, with each step."""

    tasks: list[PullTask | DropPeer] = field(default_factory=list)


@dataclass
class DataDistWorkerMeta(KVConnectorWorkerMetadata):
    """Worker ranks to the scheduler half; `aggregate` keeps every rank's answer apart."""

    rank_results: list[RankResult] = field(default_factory=list)
    # By rank, when they have changed: sentences for /health, and the rank's links for /pd/status.
    problems: dict[int, list[str]] = field(default_factory=dict)
    links: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Answers of both."""
        assert isinstance(other, DataDistWorkerMeta)
        return DataDistWorkerMeta(
            self.rank_results + other.rank_results, self.problems | other.problems, self.links | other.links
        )


@dataclass
class DataDistRankAddress(KVConnectorHandshakeMetadata):
    """Where a rank serves its caches (decode: nowhere), and how it has ordered them (`plan.layout.caches_record`)."""

    address: RankAddress
    caches: list[dict[str, Any]] = field(default_factory=list)
    kv_layout: str = ""
