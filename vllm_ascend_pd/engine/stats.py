# SPDX-License-Identifier: Apache-2.0
"""What an engine core counts: names, help texts, and the recorder. No vLLM; `prometheus.py` makes metrics of it."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import defaultdict
from typing import Any

STAGED_STAGES = ("extract", "inject")
STAGES = ("wait", "plan", "post", "renew", "link", *STAGED_STAGES, "pull", "release")
STAGE_BUCKETS = (
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    30,
    60,
)

# name -> (metric, help); the keys of the stats payload.
COUNTERS = {
    "transfers": ("vllm:pd_transfers", "Handoffs whose KV was loaded completely (decode)."),
    "transfers_empty": (
        "vllm:pd_transfers_empty",
        "Handoffs with nothing to move, as the decode side had it all cached (decode).",
    ),
    "bytes": ("vllm:pd_transfer_bytes", "KV bytes pulled from prefill instances (decode)."),
    "pieces": (
        "vllm:pd_transfer_pieces",
        "Pieces of the pulled KV: consecutive blocks of a layer are one; staged, a slot is one (decode).",
    ),
    "calls": ("vllm:pd_transfer_calls", "Calls into the data plane for pulls, by all ranks (decode)."),
    "staged": ("vllm:pd_transfers_staged", "Ranks' parts of transfers that went through staging buffers (decode)."),
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

    def take(self) -> dict[str, Any] | None:
        """The interval since the last call, or None."""
        with self._lock:
            data, self._interval = self._interval, {}
        return data or None

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
