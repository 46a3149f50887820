# SPDX-License-Identifier: Apache-2.0
"""`metrics.md`: every `vllm:pd_*` metric, from `front/metrics.py`, `engine/stats.py` and `engine/prometheus.py`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tools.reference.markdown import code, codes, page, table
from tools.reference.meanings import FALLBACKS
from tools.reference.reasons import find_fallback_reasons
from tools.reference.sources import PACKAGE, argument, called_name, name_of, parse, text_argument
from vllm_ascend_pd.engine.stats import COUNTERS, STAGES

FRONT = PACKAGE / "front/metrics.py"
ENGINE = PACKAGE / "engine/prometheus.py"
_KINDS = {"Counter": "counter", "Histogram": "histogram", "Gauge": "gauge"}


@dataclass(frozen=True)
class Metric:
    """`name` is what prometheus_client is given; a counter is scraped with `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    process: str

    @property
    def scraped(self) -> str:
        """As in `/metrics`; a histogram has `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


@functools.cache
def find_metrics() -> list[Metric]:
    """All, sorted by name."""
    engine = [
        Metric(name, "counter", ("model_name", "engine"), text, "engine core") for name, text in COUNTERS.values()
    ]
    return sorted([*_front_metrics(), *engine, *_engine_metrics()], key=lambda metric: metric.name)


def _front_metrics() -> Iterator[Metric]:
    for call in ast.walk(parse(FRONT)):
        if isinstance(call, ast.Call) and called_name(call) in _KINDS:
            name, text = text_argument(call, "name", 0), text_argument(call, "documentation", 1)
            labels = argument(call, "labelnames", 2)
            if name and text:
                yield Metric(name, _KINDS[called_name(call)], _strings(labels), text, "API server (decode)")


def _engine_metrics() -> Iterator[Metric]:
    for call in ast.walk(parse(ENGINE)):
        if isinstance(call, ast.Call) and called_name(call) in ("counter", "histogram", "gauge"):
            name, text = text_argument(call, "name"), text_argument(call, "documentation")
            if name and text:
                labels = "model_name", "engine", *_strings(argument(call, "labelnames"))
                yield Metric(name, called_name(call), labels, text, "engine core")


def _strings(node: ast.expr | None) -> tuple[str, ...]:
    if not isinstance(node, ast.List | ast.Tuple):
        return ()
    return tuple(item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str))


def render() -> str:
    """The page."""
    rows = [
        (code(metric.scraped), metric.kind, codes(metric.labels), metric.process, metric.help)
        for metric in find_metrics()
    ]
    reasons = [
        (code(reason), FALLBACKS[reason].meaning, FALLBACKS[reason].action)
        if reason in FALLBACKS
        else (code(reason), f"see {code(file)}", "")
        for reason, file in find_fallback_reasons().items()
    ]
    return page(
        "Metrics",
        "In `/metrics` of each instance, beside vLLM's own. A metric of the API server exists on decode instances from "
        "their start; one of the engine core exists on both roles and stays 0 where the other role counts. A labelled "
        "series appears when it is first counted. `engine` and `model_name` are vLLM's labels.",
        table(("metric", "type", "labels", "counted in", "what it says"), rows),
        f"`stage` is one of {codes(STAGES)}.",
        "## Reasons of `vllm:pd_remote_kv_fallback_total`",
        "A request is counted here when its prompt was prefilled by the decode instance, or refused instead "
        "(`--pd-load-failure fail`, `--pd-require-remote-kv`). `load_…` reasons are one word from the engine "
        "core's own "
        "reason: its text, which the log line of the request has in full, goes before the colon. Other words can "
        "appear "
        "as `load_failed` or with the name of an exception: those are defects, please report them.",
        table(("reason", "what happened", "what to do"), reasons),
        "`vllm:pd_ask_failures_total` has the same words without `ask_`; `vllm:pd_load_failures_total` those without "
        "`load_`, in each engine core and for every attempt, also when a later attempt succeeded.",
        f"Sources: {codes(name_of(path) for path in (FRONT, ENGINE, PACKAGE / 'engine/stats.py'))}.",
    )
