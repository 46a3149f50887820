# SPDX-License-Identifier: Apache-2.0
"""A table for people (rich) or for programs (JSON), the same for all formats. Main thread."""

from __future__ import annotations

import json
import sys
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.ascend.ranktable.model import RankTable

WIDTH_WITHOUT_TERMINAL: Final = 200  # a pipe has no width, and nothing may be cut off

_COLUMNS: Final = (
    ("group", "group"),
    ("server", "server_id"),
    ("NPU", "device_id"),
    ("IP address", "device_ip"),
    ("rank", "rank_id"),
    ("cluster", "cluster_id"),
    ("super pod", "super_pod_id"),
    ("super device", "super_device_id"),
    ("port", "device_port"),
)


def printable(text: str) -> str:
    """Without control characters: files and other hosts must not steer this terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def describe_size(table: RankTable) -> str:
    """`3 devices on 1 server`."""
    counts = ((sum(1 for _ in table.rows()), "device"), (len(table.server_ids), "server"))
    return " on ".join(f"{number} {noun}" + ("" if number == 1 else "s") for number, noun in counts)


def table_rows(table: RankTable) -> list[dict[str, str]]:
    """One flat record per device."""
    return [
        {
            "group": group.title,
            "server_id": server.server_id,
            **{name: getattr(device, name) for _, name in _COLUMNS[2:]},
        }
        for group, server, device in table.rows()
    ]


def table_as_json(table: RankTable) -> str:
    """Header and devices."""
    return json.dumps(
        {"format": table.format, "version": table.version, "status": table.status, "devices": table_rows(table)},
        indent=2,
    )


def print_table(table: RankTable, console: Console | None = None) -> None:
    """Columns that are empty everywhere are left out."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    rows = table_rows(table)
    columns = [(title, name) for title, name in _COLUMNS if any(row[name] for row in rows)]
    grid = Table(title=Text(f"{table.format} table, version {printable(table.version)}, {describe_size(table)}"))
    for title, _ in columns:
        grid.add_column(title, justify="left" if title in ("group", "server", "IP address") else "right")
    previous: tuple[str, str] | None = None
    for row in rows:
        place = (row["group"], row["server_id"])
        if previous not in (None, place):
            grid.add_section()
        previous = place
        grid.add_row(*(Text(printable(row[name])) for _, name in columns))
    console.print(grid)
