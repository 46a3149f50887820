# SPDX-License-Identifier: Apache-2.0
"""The engine core's counts on their way to the API server (`KVConnectorStats`) and into Prometheus."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_ascend_pd.engine.stats import COUNTERS, STAGE_BUCKETS

logger = logging.getLogger(__name__)


@dataclass
class DataDistStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: counters by name, `failures` by reason, `stages` as lists of seconds."""

    data: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """0.23.0's MultiConnector takes statistics for the dict that they become on the way to another process.

        Of an engine in its client's process they are never serialised, and an exception there ends the engine.
        """
        if name != "data":
            raise KeyError(name)
        return self.data

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval or another worker."""
        for key, value in other.data.items():
            if isinstance(value, dict):
                mine = self.data.setdefault(key, {})
                for name, amount in value.items():
                    mine[name] = mine[name] + amount if name in mine else amount
            else:
                self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for the periodic log."""
        line: dict[str, int | float] = {key: v for key, v in self.data.items() if not isinstance(v, dict)}
        line["failures"] = sum(self.data.get("failures", {}).values())
        pulls = self.data.get("stages", {}).get("pull", [])
        if pulls:
            line["pull_ms_avg"] = round(1000 * sum(pulls) / len(pulls), 3)
        return line

    def is_empty(self) -> bool:
        """Whether there is nothing to record."""
        return not self.data


class DataDistPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics `vllm:pd_*` of the engine core; recording never raises (I8)."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            key: counter(name=name, documentation=text, labelnames=labelnames) for key, (name, text) in COUNTERS.items()
        }
        self._failures = counter(
            name="vllm:pd_load_failures",
            documentation="Loads of remote KV that failed, by reason (decode).",
            labelnames=[*labelnames, "reason"],
        )
        self._stages = histogram(
            name="vllm:pd_stage_seconds",
            documentation="Seconds per stage of a transfer: wait (from the request's arrival until its pull is "
            "given to the workers), plan and post (what starting it takes of the engine's step), renew, link, extract "
            "and inject (staged transfers; extract: what is not hidden behind pulls), pull, release (decode).",
            buckets=STAGE_BUCKETS,
            labelnames=[*labelnames, "stage"],
        )
        for values in per_engine_labelvalues.values():
            for metric in self._counters.values():
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        try:
            self._record(transfer_stats_data, self.per_engine_labelvalues.get(engine_idx, []))
        except Exception:  # in the API server's output loop: an exception would end the engine client
            logger.exception("metrics of engine %d were not recorded", engine_idx)

    def _record(self, data: dict[str, Any], values: list[object]) -> None:
        for key, metric in self._counters.items():
            amount = data.get(key, 0)
            if amount > 0:
                metric.labels(*values).inc(amount)
        for reason, amount in data.get("failures", {}).items():
            self._failures.labels(*values, reason).inc(amount)
        for stage, samples in data.get("stages", {}).items():
            for seconds in samples:
                self._stages.labels(*values, stage).observe(max(0.0, seconds))
