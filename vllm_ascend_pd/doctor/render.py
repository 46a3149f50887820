# SPDX-License-Identifier: Apache-2.0
"""A report for people: groups and colours on a terminal, one plain line for each check elsewhere."""

from __future__ import annotations

import sys
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.doctor.check import Check, Report, State

_COLOURS: Final = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red", State.NOT_APPLICABLE: "dim"}
_STATE_WIDTH: Final = max(len(state.value) for state in State)
_KEY_WIDTH: Final = 24


def print_report(report: Report, stream: TextIO | None = None) -> None:
    """All of it, and a sum."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    if console.is_terminal:
        console.print(_table(report))
    else:
        for check in report.checks:
            print(format_line(check), file=stream)
    counts = ", ".join(f"{report.count(state)} {state.value}" for state in State if report.count(state))
    print(f"{report.about}: {counts}", file=stream, flush=True)


def format_line(check: Check) -> str:
    """State, check, what was seen, what to do."""
    todo = f" -> {check.todo}" if check.todo else ""
    return f"{check.state.value:<{_STATE_WIDTH}}  {check.key:<{_KEY_WIDTH}}  {check.seen}{todo}"


def _table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    for column in ("", "check", "seen", "what to do"):
        table.add_column(column, overflow="fold")
    group = ""
    for check in report.checks:
        if check.group != group:
            group = check.group
            table.add_row("", Text(group, "bold"), "", "")
        colour = _COLOURS[check.state]
        table.add_row(
            Text(check.state.value, colour), Text(f"  {check.name}"), Text(check.seen), Text(check.todo, "yellow")
        )
    return table
