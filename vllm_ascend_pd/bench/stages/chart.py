# SPDX-License-Identifier: Apache-2.0
"""The field's chart: stacked stages of save and load, per layer and fused, by length. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.bench.stages.methods import STAGES
from vllm_ascend_pd.bench.stages.report import OVERALL

_COLOURS: Final = {"extract": "#2471a3", "scatter": "#7fb3d5", "pull": "#aab7b8", "inject": "#c0392b"}
_METHODS: Final = ("per-layer", "fused")
_WIDTH: Final = 0.2


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the file: one panel per shape; per length two pairs of bars, stages with syncs and the whole without."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = document["settings"]["shapes"]
    columns = min(2, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns, 3.7 * lines), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(shapes) :]:
        panel.axis("off")
    for panel, shape in zip(panels.flat, shapes, strict=False):
        _draw_panel(panel, document["chart_seconds"].get(shape["name"], {}))
        panel.set_title(f"{shape['label']}, {shape['num_layers']} layers", fontsize=10)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    machine, settings = document["machine"], document["settings"]
    figure.suptitle(
        f"save (extract + scatter) and load (pull + inject); left pair: per layer, right pair: fused\n"
        f"block {settings['block_size']}, {machine['cpu']}, {machine['cpus']} CPUs, "
        f"median of {settings['rounds']} rounds",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_panel(panel: Any, rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    for index, methods in enumerate(rows.values()):
        for number, method in enumerate(_METHODS):
            row = methods.get(method)
            if row is None:
                continue
            place, bottom = index + (number - 0.5) * 2.1 * _WIDTH - _WIDTH / 2, 0.0
            is_first = index == 0 and number == 0
            for stage in STAGES:
                height = row[stage] * 1e3
                label = stage if is_first else None
                panel.bar(place, height, _WIDTH, bottom=bottom, color=_COLOURS[stage], label=label)
                bottom += height
            label = "whole, no syncs" if is_first else None
            panel.bar(place + _WIDTH, row[OVERALL] * 1e3, _WIDTH * 0.8, color="white", edgecolor="#333333", label=label)
    panel.set_xticks(range(len(rows)), [_format_tokens(int(tokens)) for tokens in rows])
    panel.set_xlabel("tokens")
    panel.set_ylabel("ms")
    panel.grid(axis="y", alpha=0.3)


def _format_tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
