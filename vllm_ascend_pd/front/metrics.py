# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the front door. Recording never raises: a metric must not end a request.

The metrics of transfers themselves come from the engine core, through upstream's connector statistics. In
multiprocess mode prometheus_client sums over the API servers.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Histogram

logger = logging.getLogger(__name__)

ASK_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class FrontMetrics:
    """One per process; see `get_metrics`."""

    def __init__(self) -> None:
        # Registered apart from construction: building vLLM's own metrics unregisters everything named vllm.
        self._requests = Counter(
            "vllm:pd_requests",
            "Requests on a decode instance, by where their prompt's KV came from: remote, local, failed, gone.",
            ["path"],
            registry=None,
        )
        self._fallbacks = Counter(
            "vllm:pd_remote_kv_fallback",
            "Requests that a decode instance prefilled itself, or refused to, by reason.",
            ["reason"],
            registry=None,
        )
        self._ask_seconds = Histogram(
            "vllm:pd_ask_seconds",
            "Seconds from asking a prefill instance to its handoff.",
            buckets=ASK_BUCKETS_S,
            registry=None,
        )
        self._ask_failures = Counter(
            "vllm:pd_ask_failures",
            "Asks that a prefill instance did not answer with a handoff, by reason.",
            ["reason"],
            registry=None,
        )

    def register(self) -> None:
        """Make the metrics visible. May be called again."""
        for collector in (self._requests, self._fallbacks, self._ask_seconds, self._ask_failures):
            try:
                REGISTRY.register(collector)
            except ValueError:
                pass  # it is registered

    def count_request(self, path: str) -> None:
        """A request on D has ended its wait for KV."""
        _safely(lambda: self._requests.labels(path=path).inc())

    def count_fallback(self, reason: str) -> None:
        """A request on D goes on without remote KV."""
        _safely(lambda: self._fallbacks.labels(reason=reason).inc())

    def observe_ask(self, seconds: float) -> None:
        """An ask was answered with a handoff."""
        _safely(lambda: self._ask_seconds.observe(seconds))

    def count_ask_failure(self, reason: str) -> None:
        """An ask was not."""
        _safely(lambda: self._ask_failures.labels(reason=reason).inc())


@functools.cache
def get_metrics() -> FrontMetrics:
    """This process's metrics."""
    return FrontMetrics()


def _safely(record: Any) -> None:
    try:
        record()
    except Exception:
        logger.debug("a metric could not be recorded", exc_info=True)
