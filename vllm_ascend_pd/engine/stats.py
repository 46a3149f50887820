# SPDX-License-Identifier: Apache-2.0
"""What an engine core counts, as `KVConnectorStats`, and the Prometheus metrics made from it in the API server."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

STAGES = ("wait", "renew", "link", "pull", "release")
STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

# name -> (metric, help); the keys of the stats payload.
COUNTERS = {
    "transfers": ("vllm:pd_transfers", "Handoffs whose KV was loaded completely (decode)."),
    "transfers_empty": (
        "vllm:pd_transfers_empty",
        "Handoffs with nothing to move, as the decode side had it all cached (decode).",
    ),
    "bytes": ("vllm:pd_transfer_bytes", "KV bytes pulled from prefill instances (decode)."),
    "tokens": ("vllm:pd_loaded_tokens", "Prompt tokens whose KV came from a prefill instance (decode)."),
    "leases_granted": ("vllm:pd_leases_granted", "Leases granted on finished prompts (prefill)."),
    "leases_released": ("vllm:pd_leases_released", "Leases that all readers released (prefill)."),
    "leases_expired": ("vllm:pd_leases_expired", "Leases that ended by time (prefill)."),
    "leases_cancelled": ("vllm:pd_leases_cancelled", "Leases ended by a cancel from the decode side (prefill)."),
    "leases_denied": (
        "vllm:pd_leases_denied",
        "Finished prompts without a lease: unsigned share exhausted, or cancelled before (prefill).",
    ),
}


@dataclass
class DataDistStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: counters by name, `failures` by reason, `stages` as lists of seconds."""

    data: dict[str, Any] = field(default_factory=dict)

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


class StatsRecorder:
    """Counts on any thread; `take` hands the interval to the scheduler, `totals` is for /pd/status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interval: dict[str, Any] = {}
        self._totals: Tally[str] = Tally()
        self._failures: Tally[str] = Tally()
        self._seconds: dict[str, float] = defaultdict(float)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of COUNTERS."""
        with self._lock:
            self._interval[name] = self._interval.get(name, 0) + amount
            self._totals[name] += amount

    def fail(self, reason: str) -> None:
        """One failed load."""
        reason = reason_label(reason)
        with self._lock:
            failures = self._interval.setdefault("failures", {})
            failures[reason] = failures.get(reason, 0) + 1
            self._failures[reason] += 1

    def stage(self, name: str, seconds: float) -> None:
        """Time of one stage of one transfer."""
        with self._lock:
            self._interval.setdefault("stages", {}).setdefault(name, []).append(seconds)
            self._seconds[name] += seconds

    def take(self) -> DataDistStats | None:
        """The interval since the last call, or None."""
        with self._lock:
            data, self._interval = self._interval, {}
        return DataDistStats(data=data) if data else None

    def totals(self) -> dict[str, Any]:
        """Since start, JSON-able."""
        with self._lock:
            totals: dict[str, Any] = {name: self._totals[name] for name in COUNTERS}
            totals["tokens_loaded_remotely"] = self._totals["tokens"]
            totals["bytes_pulled"] = self._totals["bytes"]
            totals["failures"] = dict(self._failures)
            totals["seconds"] = {name: round(self._seconds[name], 6) for name in STAGES}
        return totals


def reason_label(reason: str) -> str:
    """A bounded set of label values out of free text: the part before the first colon, if it is a word."""
    head = reason.split(":", 1)[0].strip().replace(" ", "_")
    return head if head.isidentifier() and len(head) <= 32 else "other"


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
            documentation="Seconds per stage of a transfer: wait (admitted, no handoff yet), renew, link, pull, "
            "release (decode).",
            buckets=STAGE_BUCKETS,
            labelnames=[*labelnames, "stage"],
        )
        for values in per_engine_labelvalues.values():
            for metric in self._counters.values():
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        values = self.per_engine_labelvalues.get(engine_idx, [])
        for key, metric in self._counters.items():
            amount = transfer_stats_data.get(key, 0)
            if amount > 0:
                metric.labels(*values).inc(amount)
        for reason, amount in transfer_stats_data.get("failures", {}).items():
            self._failures.labels(*values, reason).inc(amount)
        for stage, samples in transfer_stats_data.get("stages", {}).items():
            for seconds in samples:
                self._stages.labels(*values, stage).observe(max(0.0, seconds))
