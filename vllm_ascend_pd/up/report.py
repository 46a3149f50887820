# SPDX-License-Identifier: Apache-2.0
"""What `vllm pd up` shows: progress while the servers start, then where they are and a command to paste.

On a terminal one line per instance is redrawn in place; elsewhere (a log, CI) each instance says where it is
when that has changed, at most every ten seconds. Called by `supervise.py` from its one thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.up.plan import Deployment, Instance, Role

# Where nothing can be redrawn, an instance is mentioned when its log has moved on, and now and then anyway.
QUIET_S: Final = 10.0
SILENT_S: Final = 60.0
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TELLING: Final = re.compile(r"^(\([^)]*\)\s*)*(INFO |ERROR |Loading )")
_PREFIX: Final = re.compile(
    r"^(\([^)]*\)\s*)*(INFO|WARNING|ERROR|DEBUG)?\s*[\d:. -]*(\[[^\]]*\])?\s*"
)  # of vLLM's log lines


def choose_log_line(tail: Sequence[str]) -> str:
    """The newest line that says what the server does: messages of several lines and warnings of libraries do not."""
    telling = [line for line in tail if _TELLING.match(_ESCAPE.sub("", line))]
    return shorten_log_line((telling or list(tail) or [""])[-1])


def shorten_log_line(line: str, width: int = 90) -> str:
    """The message of a vLLM log line, without colours, process, level, time and place."""
    bare = _ESCAPE.sub("", line).strip()
    message = _PREFIX.sub("", bare) or bare
    return message if len(message) <= width else message[: width - 1] + "…"


@dataclass
class _Row:
    state: str = "starting"
    elapsed_s: float = 0.0
    line: str = ""
    said: str = ""
    said_at_s: float = 0.0


@dataclass
class StartProgress:
    """Implements `supervise.Progress` on a rich console."""

    console: Console = field(default_factory=lambda: Console(stderr=True))
    _rows: dict[str, _Row] = field(default_factory=dict)
    _live: Live | None = None

    def starting(self, instance: Instance) -> None:
        """Add a row."""
        self._rows[instance.name] = _Row()
        self._say(f"[bold]{instance.name}[/] starting on {instance.url}, log {instance.log}")

    def waiting(self, instance: Instance, elapsed_s: float, tail: Sequence[str]) -> None:
        """Redraw, or say something now and then."""
        row = self._rows[instance.name]
        row.elapsed_s, row.line = elapsed_s, choose_log_line(tail)
        if self.console.is_terminal:
            self._draw()
        elif elapsed_s - row.said_at_s >= (QUIET_S if row.line != row.said else SILENT_S):
            row.said, row.said_at_s = row.line, elapsed_s
            self._say(f"{instance.name} {elapsed_s:.0f} s  ", row.line)

    def ready(self, instance: Instance, elapsed_s: float) -> None:
        """Mark the row; the last one ends the drawing."""
        row = self._rows[instance.name]
        row.state, row.elapsed_s, row.line = "ready", elapsed_s, ""
        if self._live is not None:
            self._draw()
        else:
            self._say(f"[bold]{instance.name}[/] [green]ready[/] after {elapsed_s:.0f} s")
        if all(each.state == "ready" for each in self._rows.values()):
            self.close()

    def stopping(self, instance: Instance) -> None:
        """Say it."""
        self.close()
        self._say(f"{instance.name} stopping")

    def killed(self, instance: Instance) -> None:
        """Say it."""
        self.close()
        self._say(f"[yellow]{instance.name} did not stop in time and was killed[/]")

    def close(self) -> None:
        """Leave what was drawn on the screen and draw no more."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, markup: str, plain: str = "") -> None:
        self.console.print(Text.from_markup(markup) + Text(plain), soft_wrap=True)

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._live.start()
        table = Table.grid(padding=(0, 2))
        for name, row in self._rows.items():
            colour = "green" if row.state == "ready" else "yellow"
            table.add_row(Text(name, "bold"), Text(row.state, colour), f"{row.elapsed_s:4.0f} s", Text(row.line, "dim"))
        self._live.update(table, refresh=True)


def make_curl(deployment: Deployment) -> str:
    """A completion to paste into a shell."""
    body = {"model": deployment.model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    text = json.dumps(body).replace("'", "'\\''")
    url = deployment.of_role(Role.DECODE)[0].url
    return f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{text}'"


def print_endpoints(deployment: Deployment, console: Console) -> None:
    """Where the clients go, where the prefill instances are, what to paste."""
    console.print(f"\n[bold green]Up:[/] {deployment.model}", soft_wrap=True)
    for role, use in ((Role.DECODE, "send requests here (OpenAI API)"), (Role.PREFILL, "prefill, asked by decode")):
        for instance in deployment.of_role(role):
            console.print(f"  {instance.name:<12} {instance.url}  [dim]{use}[/]", soft_wrap=True)
    console.print(f"  logs         {deployment.instances[0].log.parent}", soft_wrap=True)
    console.print(f"\nTry:\n  {make_curl(deployment)}", soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"\nState: vllm pd status {deployment.of_role(Role.DECODE)[0].url}     Stop: Ctrl-C\n", soft_wrap=True
    )
