# SPDX-License-Identifier: Apache-2.0
"""The chart of `bench transfer`: GB/s over piece size, one line per family at its best. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.bench.ratios import format_bytes
from vllm_ascend_pd.bench.transfer import specs

# family -> (label, colour, line style)
_STYLES: Final = {
    specs.LIMIT: ("copy limit of this run", "#888888", "--"),
    specs.MAPPED: ("ours, mapped", "#c0392b", "-"),
    specs.NIXL: ("NIXL, UCX auto (best setting)", "#2471a3", "-"),
    specs.MOONCAKE: ("Mooncake TE, TCP", "#d68910", "-"),
    specs.RAW: ("one raw TCP stream", "#bbbbbb", "--"),
    specs.TCP: ("ours, TCP", "#e59866", "-"),
    specs.NIXL_TCP: ("NIXL, UCX tcp", "#7fb3d5", "-"),
    specs.GLOO: ("torch gloo", "#7d3c98", "-"),
}


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    pieces = document["settings"]["pieces"]
    for family, (label, colour, style) in _STYLES.items():
        row = document["best_gb_per_s"].get(family, {})
        points = [(piece, row[str(piece)]) for piece in pieces if str(piece) in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(pieces, [format_bytes(piece) for piece in pieces], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("piece size")
    axes.set_ylabel("GB/s")
    payload, machine = format_bytes(document["settings"]["payload_bytes"]), document["machine"]
    axes.set_title(
        f"{payload} between two processes of one machine\n{machine['cpu']}, {machine['cpus']} CPUs, "
        f"median of {document['settings']['rounds']} rounds",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
