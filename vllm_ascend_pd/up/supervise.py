# SPDX-License-Identifier: Apache-2.0
"""Run the planned processes: start, wait until all are healthy, watch, stop all.

One thread. Children live in process groups of their own, so that Ctrl-C reaches only the supervisor, and carry a
parent-death signal, so that none outlives it. Nothing is restarted: when one dies the error says which, with the
end of its log, and all others are stopped. Before: `plan.py`. What the user sees meanwhile: `report.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import httpx

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.up.plan import DROPPED_VARIABLES, Deployment, Instance, Role

EXEC_CHILD: Final = Path(__file__).with_name("exec_child.py")
POLL_S: Final = 0.25
PROBE_TIMEOUT_S: Final = 2.0
GRACE_S: Final = 30.0  # between SIGTERM and SIGKILL; requests may end in it
NUM_TAIL_LINES: Final = 20
TAIL_BYTES: Final = 64 << 10
STOP_ORDER: Final = (Role.AGGREGATED, Role.DECODE, Role.PREFILL)  # decode first: it still reads from prefill


class InstanceFailed(PDError):
    """One server ended, or never became healthy. Action: read the end of its log, which the message carries."""


class Progress(Protocol):
    """What the supervisor tells while it works; called often, must return quickly."""

    def starting(self, instance: Instance) -> None:
        """The process was started."""

    def waiting(self, instance: Instance, elapsed_s: float, tail: Sequence[str]) -> None:
        """Not healthy yet; `tail` are the newest lines of its log, oldest first."""

    def ready(self, instance: Instance, elapsed_s: float) -> None:
        """`/health` answered 200 for the first time."""

    def stopping(self, instance: Instance) -> None:
        """SIGTERM was sent."""

    def killed(self, instance: Instance) -> None:
        """It did not end in time and was killed."""


def probe_health(instance: Instance) -> bool:
    """Whether `/health` answers 200; never raises, blocks for two seconds at most."""
    try:
        with httpx.Client(trust_env=False, timeout=PROBE_TIMEOUT_S) as client:
            return client.get(f"{instance.url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def read_tail(path: Path, num_lines: int = NUM_TAIL_LINES) -> list[str]:
    """The last lines of a log that have text, oldest first; empty when there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in lines if line][-num_lines:]


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


@dataclass
class _Child:
    instance: Instance
    process: subprocess.Popen[bytes]
    started: float
    is_ready: bool = False
    is_stopped: bool = False  # by us


@dataclass
class Supervisor:
    """Owns the processes of one deployment; use it as a context manager, leaving it stops all.

    `probe`, `clock` and `sleep` are there for tests.
    """

    deployment: Deployment
    progress: Progress
    grace_s: float = GRACE_S
    probe: Callable[[Instance], bool] = probe_health
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _children: list[_Child] = field(default_factory=list)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop_all()

    def start(self) -> None:
        """Start every instance. They find each other by themselves: decode waits for its prefill."""
        for instance in self.deployment.instances:
            instance.log.parent.mkdir(parents=True, exist_ok=True)
            env = {k: v for k, v in os.environ.items() if k not in DROPPED_VARIABLES} | dict(instance.env)
            with instance.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, str(EXEC_CHILD), str(os.getpid()), *instance.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    process_group=0,  # all in one session, as Linux may share the CPU by session
                )
            self._children.append(_Child(instance, process, self.clock()))
            self.progress.starting(instance)

    def wait_ready(self, timeout_s: float) -> None:
        """Block until every instance is healthy.

        Raises:
            InstanceFailed: one ended meanwhile, or is not healthy after `timeout_s`.
        """
        deadline = self.clock() + timeout_s
        while True:
            for child in self._children:
                self.check_alive()
                if not child.is_ready and self.probe(child.instance):
                    child.is_ready = True
                    self.progress.ready(child.instance, self.clock() - child.started)
            pending = [child for child in self._children if not child.is_ready]
            if not pending:
                return
            for child in pending:
                self.progress.waiting(child.instance, self.clock() - child.started, read_tail(child.instance.log))
            if self.clock() > deadline:
                raise self._failure(pending[0], f"is not healthy after {timeout_s:.0f} s")
            self.sleep(POLL_S)

    def watch(self) -> None:
        """Block until an instance ends by itself (a signal handler that raises is the other way out).

        Raises:
            InstanceFailed: one ended; the others still run until this supervisor is left.
        """
        while True:
            self.check_alive()
            self.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise InstanceFailed for the first instance that ended without being told to."""
        for child in self._children:
            code = child.process.poll()
            if code is not None and not child.is_stopped:
                raise self._failure(child, f"ended with {describe_exit(code)}")

    def stop(self, instance: Instance) -> None:
        """Stop one instance and keep the others."""
        self._stop([child for child in self._children if child.instance.name == instance.name])

    def stop_all(self) -> None:
        """Stop every instance, decode before prefill; a second Ctrl-C meanwhile kills what is left."""
        try:
            for role in STOP_ORDER:
                self._stop([child for child in self._children if child.instance.role is role])
        except KeyboardInterrupt:
            self._kill(self._children)

    def _stop(self, children: Iterable[_Child]) -> None:
        running = []
        for child in children:
            if not child.is_stopped and child.process.poll() is None:
                child.process.terminate()
                self.progress.stopping(child.instance)
                running.append(child)
            child.is_stopped = True
        deadline = self.clock() + self.grace_s
        while any(child.process.poll() is None for child in running) and self.clock() < deadline:
            self.sleep(POLL_S)
        self._kill(children)

    def _kill(self, children: Iterable[_Child]) -> None:
        """End what is left of these groups: a server that hangs, or workers that it left behind."""
        for child in children:
            child.is_stopped = True
            if child.process.poll() is None:
                self.progress.killed(child.instance)
            try:
                os.killpg(child.process.pid, signal.SIGKILL)  # a group that we started
            except (ProcessLookupError, PermissionError):
                pass
            child.process.wait()

    def _failure(self, child: _Child, what: str) -> InstanceFailed:
        tail = read_tail(child.instance.log)
        shown = "\n".join(f"    {line}" for line in tail) or "    (empty)"
        return InstanceFailed(
            f"{child.instance.name} ({child.instance.url}) {what}.\n"
            f"  The last {len(tail)} lines of {child.instance.log}:\n{shown}"
        )
