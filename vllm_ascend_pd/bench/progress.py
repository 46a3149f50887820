# SPDX-License-Identifier: Apache-2.0
"""Progress of long work on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_QUIET_S: Final = 15.0


class BenchProgress:
    """A context manager; `say` and `step` may be called inside it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: int | None = None
        self._done = self._total = 0
        self._said_at_s = 0.0

    def __enter__(self) -> BenchProgress:
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, num_steps: int) -> None:
        """So many steps follow."""
        self._done, self._total, self._said_at_s = 0, num_steps, 0.0
        if self._bar is not None:
            self._task = self._bar.add_task("", total=num_steps)

    def step(self, what: str) -> None:
        """One step begins."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=self._done)  # type: ignore[arg-type]
        elif time.monotonic() - self._said_at_s >= _QUIET_S:
            self._said_at_s = time.monotonic()
            self.console.print(f"{self._done} of {self._total}: {what}", soft_wrap=True, markup=False, highlight=False)
        self._done += 1

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)
