# SPDX-License-Identifier: Apache-2.0
"""`bench stages`: samples into medians, ratios, tables and a JSON document. Pure except for printing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from vllm_ascend_pd.bench.output import FORMAT_VERSION
from vllm_ascend_pd.bench.ratios import divide, format_bytes, take_medians
from vllm_ascend_pd.bench.stages.methods import SAVE, STAGES
from vllm_ascend_pd.bench.stages.run import LARGE, ONE_BLOCK, ONE_BLOCK_COLD, Sample, StagesPlan, StagesResult
from vllm_ascend_pd.bench.stages.shapes import SHAPES

OVERALL: Final = "overall"
_LABELS: Final = {shape.name: shape.label for shape in SHAPES}
_MS: Final = 1e3


def compute_case_seconds(samples: Iterable[Sample]) -> dict[str, dict[str, dict[str, float]]]:
    """ratio case -> method -> shape -> median seconds."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    counting = (s for s in samples if s.phase == "round" and s.case != "tokens")
    medians = take_medians(((s.case, s.method, s.shape), s.seconds) for s in counting)
    for (case, method, shape), seconds in medians.items():
        rows.setdefault(case, {}).setdefault(method, {})[shape] = seconds
    return rows


def compute_chart(samples: Iterable[Sample]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """shape -> tokens -> method -> median seconds of each stage, and `overall`."""
    groups: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        if sample.case == "tokens" and sample.phase == "round":
            groups.setdefault((sample.shape, sample.num_tokens, sample.method), []).append(sample)
    chart: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for (shape, tokens, method), group in groups.items():
        row = {OVERALL: median(sample.seconds for sample in group)}
        for stage in STAGES:
            row[stage] = median((sample.stages or {}).get(stage, 0.0) for sample in group)
        chart.setdefault(shape, {}).setdefault(str(tokens), {})[method] = row
    return chart


def compute_ratios(cases: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """How many times faster than a loop over layers; `staged_vs_ideal`: how many times the ideal time."""
    ratios = {}
    for case in (ONE_BLOCK, LARGE, ONE_BLOCK_COLD):
        rows = cases.get(case, {})
        for ours in ("staged", "straight"):
            for loop in ("per-layer", "per-layer-wide", "per-layer-field"):
                name = f"{ours}_vs_{loop.replace('-', '_')}_{case}"
                ratios[name] = divide(rows.get(loop, {}), rows.get(ours, {}))
    large = cases.get(LARGE, {})
    twice = {shape: 2 * seconds for shape, seconds in large.get("limit", {}).items()}
    ratios["staged_vs_ideal"] = divide(large.get("staged", {}), twice)
    ratios["straight_vs_ideal"] = divide(large.get("straight", {}), large.get("limit", {}))
    return ratios


def compute_overall_ratios(chart: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """shape -> tokens -> per layer / fused, both without syncs."""
    return {
        shape: {
            tokens: methods["per-layer"][OVERALL] / methods["fused"][OVERALL]
            for tokens, methods in rows.items()
            if {"per-layer", "fused"} <= methods.keys()
        }
        for shape, rows in chart.items()
    }


def build_document(plan: StagesPlan, result: StagesResult, context: Mapping[str, Any]) -> dict[str, Any]:
    """What `--json` writes."""
    cases, chart = compute_case_seconds(result.samples), compute_chart(result.samples)
    return {
        "bench": "stages",
        "format": FORMAT_VERSION,
        **context,
        "settings": {
            "shapes": [asdict(shape) for shape in plan.shapes],
            "lengths": list(plan.lengths),
            "block_size": plan.block_size,
            "rounds": plan.rounds,
            "max_bytes": plan.max_bytes,
            "pool_bytes": result.pool_bytes,
            "staging_bytes": result.staging_bytes,
            "threads": plan.num_threads,
            "seed": plan.seed,
        },
        "cases": [asdict(case) for case in result.cases],
        "chart_seconds": chart,
        "case_seconds": cases,
        "ratios": compute_ratios(cases),
        "overall_vs_per_layer": compute_overall_ratios(chart),
        "samples": [asdict(sample) for sample in result.samples],
    }


def print_document(document: Mapping[str, Any], console: Console) -> None:
    """Both tables, and what was not run."""
    console.print(make_chart_table(document))
    console.print(make_ratio_table(document))
    for case in document["cases"]:
        name = f"{_LABELS.get(case['shape'], case['shape'])}, {case['num_tokens']} tokens"
        if case["reason"]:
            console.print(f"{name}: not run: {case['reason']}", soft_wrap=True, highlight=False)
        elif case["num_passes"] > 1:
            note = f"{name}: {format_bytes(case['num_bytes'])} in {case['num_passes']} passes over its layers"
            console.print(note, soft_wrap=True, highlight=False)


def make_chart_table(document: Mapping[str, Any]) -> Table:
    """Milliseconds by shape, length and method."""
    table = Table(title=f"save and load, ms, median of {document['settings']['rounds']} rounds")
    for name in ("shape", "tokens", "method"):
        table.add_column(name, no_wrap=True)
    for name in (*STAGES, "save", "load", "no syncs"):
        table.add_column(name, justify="right", no_wrap=True)
    for shape, rows in document["chart_seconds"].items():
        for tokens, methods in rows.items():
            for method, row in sorted(methods.items(), reverse=True):
                save = sum(row[stage] for stage in SAVE)
                load = sum(row[stage] for stage in STAGES) - save
                values = [*(row[stage] for stage in STAGES), save, load, row[OVERALL]]
                table.add_row(_LABELS[shape], tokens, method, *[f"{_MS * value:.2f}" for value in values])
        table.add_section()
    return table


def make_ratio_table(document: Mapping[str, Any]) -> Table:
    """Ratios by shape."""
    shapes = [shape["name"] for shape in document["settings"]["shapes"]]
    table = Table(title="ratios: times faster than the loop over layers; vs ideal: times its duration")
    table.add_column("ratio", no_wrap=True)
    for shape in shapes:
        table.add_column(_LABELS[shape], justify="right")
    for name, values in document["ratios"].items():
        table.add_row(name, *[f"{values[shape]:.2f}×" if shape in values else "–" for shape in shapes])
    return table
