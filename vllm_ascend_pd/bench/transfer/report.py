# SPDX-License-Identifier: Apache-2.0
"""`bench transfer`: samples into medians, ratios, a table and a JSON document. Pure except for printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from vllm_ascend_pd.bench.output import FORMAT_VERSION
from vllm_ascend_pd.bench.ratios import divide, format_bytes, take_medians, to_gb_per_s
from vllm_ascend_pd.bench.transfer.run import Outcome, TransferPlan, TransferResult
from vllm_ascend_pd.bench.transfer.specs import RATIOS

WRONG_BYTES: Final = "wrong bytes"


def compute_gb_per_s(result: TransferResult, payload_bytes: int) -> dict[str, dict[str, float]]:
    """contender -> piece size in bytes -> median GB/s of the rounds. Nothing for one that delivered wrong bytes."""
    bad = {outcome.spec.name for outcome in result.outcomes if outcome.state == WRONG_BYTES}
    rows: dict[str, dict[str, float]] = {o.spec.name: {} for o in result.outcomes if o.spec.name not in bad}
    medians = take_medians(
        ((s.contender, s.piece_bytes), s.seconds)
        for s in result.samples
        if s.phase == "round" and s.contender not in bad
    )
    for (name, piece), seconds in medians.items():
        rows[name][str(piece)] = to_gb_per_s(payload_bytes, seconds)
    return rows


def take_best_of_families(
    rows: Mapping[str, Mapping[str, float]], outcomes: list[Outcome]
) -> dict[str, dict[str, float]]:
    """family -> piece size -> GB/s of its fastest contender there."""
    best: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        for piece, value in rows.get(outcome.spec.name, {}).items():
            family = best.setdefault(outcome.spec.family, {})
            family[piece] = max(value, family.get(piece, 0.0))
    return best


def compute_ratios(best: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Every ratio by name; an empty object where a side is missing."""
    return {name: divide(best.get(above, {}), best.get(below, {})) for name, (above, below) in RATIOS.items()}


def build_document(plan: TransferPlan, result: TransferResult, context: Mapping[str, Any]) -> dict[str, Any]:
    """What `--json` writes."""
    rows = compute_gb_per_s(result, plan.geometry.payload_bytes)
    best = take_best_of_families(rows, result.outcomes)
    return {
        "bench": "transfer",
        "format": FORMAT_VERSION,
        **context,
        "settings": {
            **asdict(plan.geometry),
            "pieces": list(plan.pieces),
            "tensors": {str(piece): plan.geometry.layout(piece).num_tensors for piece in plan.pieces},
            "rounds": plan.rounds,
            "threads": plan.num_threads,
            "seed": plan.seed,
            "options": plan.options,
        },
        "contenders": [_describe(outcome) for outcome in result.outcomes],
        "gb_per_s": rows,
        "best_gb_per_s": best,
        "ratios": compute_ratios(best),
        "samples": [asdict(sample) for sample in result.samples],
    }


def _describe(outcome: Outcome) -> dict[str, Any]:
    spec = outcome.spec
    return {
        "name": spec.name,
        "family": spec.family,
        "label": spec.label,
        "state": outcome.state,
        "reason": outcome.reason,
        "facts": outcome.facts,
        "idle_cpus": outcome.idle_cpu,
        "environment": dict(spec.environment),
        "options": dict(spec.options),
        "variants": {str(piece): variant for piece, variant in outcome.variants.items()},
    }


def print_document(document: Mapping[str, Any], console: Console) -> None:
    """GB/s by contender and piece size, then the ratios."""
    pieces = [str(piece) for piece in document["settings"]["pieces"]]
    payload = format_bytes(document["settings"]["payload_bytes"])
    rounds = document["settings"]["rounds"]
    table = Table(title=f"{payload} between two processes, GB/s (10^9), median of {rounds} rounds")
    table.add_column("pieces of", no_wrap=True)
    for piece in pieces:
        table.add_column(format_bytes(int(piece)), justify="right")
    for contender in document["contenders"]:
        row = document["gb_per_s"].get(contender["name"], {})
        if contender["state"] == "ran" or row:
            cells = [f"{row[piece]:.2f}" if piece in row else "–" for piece in pieces]
        else:
            cells = [contender["state"]] + [""] * (len(pieces) - 1)
        table.add_row(contender["label"], *cells)
    table.add_section()
    for name, values in document["ratios"].items():
        table.add_row(name, *[f"{values[piece]:.2f}×" if piece in values else "–" for piece in pieces])
    console.print(table)
    for contender in document["contenders"]:
        if contender["state"] != "ran":
            reason = f"{contender['label']}: {contender['state']}: {contender['reason']}"
            console.print(reason, soft_wrap=True, markup=False, highlight=False)
