# SPDX-License-Identifier: Apache-2.0
"""A contender's processes as the driver sees them: fresh interpreters, commands with deadlines, stopped while idle.

The driver's one thread calls everything. Children have a session of their own, so Ctrl-C reaches the driver alone,
which kills them; they also die when it is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.bench.transfer.specs import Spec

PACKAGE: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 180.0
CALL_TIMEOUT_S: Final = 180.0
_TAIL_LINES: Final = 5


class ChildError(Exception):
    """A contender's process said no, died, or did not answer. `kind`: not installed, wrong bytes, failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Start:
    """How to start processes: interpreters by kind, a folder that makes our package importable, the job."""

    python: str
    peers_python: str
    import_folder: Path
    job: Mapping[str, Any]

    def for_spec(self, spec: Spec) -> str:
        """The interpreter."""
        return self.peers_python if spec.is_peer else self.python


class Child:
    """One process."""

    def __init__(self, spec: Spec, role: str, start: Start) -> None:
        self.name = f"{spec.name} {role}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        job = {**start.job, "role": role, "module": spec.module, "num_processes": spec.num_processes}
        job["options"] = {**start.job["options"].get(spec.module, {}), **spec.options}
        environment = {**os.environ, "PYTHONPATH": str(start.import_folder), **spec.environment}
        command = [start.for_spec(spec), "-m", "vllm_ascend_pd.bench.transfer.worker", json.dumps(job)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            cwd=start.import_folder,
        )
        self._pending = b""
        self._is_stopped = False

    def wait_started(self) -> None:
        """Until its pool is touched. Raises ChildError."""
        self.receive(START_TIMEOUT_S)

    def send(self, command: str, **arguments: Any) -> None:
        """Ask without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildError("failed", f"{self.name} is gone: {error}{self._tail()}") from None

    def receive(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The next answer. Raises ChildError."""
        assert self._process.stdout is not None
        deadline, fd = time.monotonic() + timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ChildError("failed", f"{self.name} did not answer within {timeout_s:.0f} s{self._tail()}")
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise ChildError("failed", f"{self.name} ended with {self._process.wait()}{self._tail()}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        message = json.loads(line)
        if "error" in message:
            raise ChildError(message["kind"], f"{self.name}: {message['error']}")
        return message["result"]

    def call(self, command: str, **arguments: Any) -> Any:
        """Ask and wait."""
        self.send(command, **arguments)
        return self.receive()

    def used_cpu_s(self) -> float:
        """CPU seconds of the process so far, as the kernel counts them."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Take it off the CPUs."""
        if not self._is_stopped:
            self._signal(signal.SIGSTOP)
            self._is_stopped = True

    def resume(self) -> None:
        """Let it run."""
        if self._is_stopped:
            self._signal(signal.SIGCONT)
            self._is_stopped = False

    def end(self) -> None:
        """Kill it and wait for it."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                pass  # unsent bytes to a dead process

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        return ("; it printed: " + " | ".join(lines)) if lines else ""


class Pair:
    """The processes of one contender."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.facts: dict[str, Any] = {}
        self.idle_cpu = 0.0  # CPUs that it uses when nothing is asked of it
        self.stops_when_idle = False
        self._source: Child | None = None
        self._reader: Child | None = None

    @property
    def children(self) -> list[Child]:
        """Those that run."""
        return [child for child in (self._source, self._reader) if child is not None]

    @property
    def reader(self) -> Child:
        """Which pulls."""
        assert self._reader is not None
        return self._reader

    def start(self, start: Start) -> None:
        """Start both, link them, see what they do when idle. Raises ChildError."""
        if self.spec.num_processes == 2:
            self._source = Child(self.spec, "source", start)
        self._reader = Child(self.spec, "reader", start)
        for child in self.children:
            child.wait_started()
        hello: Any = {}
        if self._source is not None:
            hello = self._source.call("hello")
            self._source.send("accept")
        self.facts = self.reader.call("connect", hello=hello)
        if self._source is not None:
            self._source.receive()

    def measure_idle(self, seconds: float) -> None:
        """A contender that burns CPU while it waits is stopped while others are on: it would spoil their numbers."""
        before = sum(child.used_cpu_s() for child in self.children)
        time.sleep(seconds)
        self.idle_cpu = (sum(child.used_cpu_s() for child in self.children) - before) / seconds
        self.stops_when_idle = self.idle_cpu > 0.02

    def pull(self, piece: int, seed: int, variant: str) -> dict[str, Any]:
        """One verified pull; adds the source's CPU time. Raises ChildError."""
        arguments = {"piece": piece, "seed": seed, "variant": variant}
        if self._source is None:
            result: dict[str, Any] = self.reader.call("pull", **arguments)
            return result
        before = self._source.call("cpu")
        self._source.send("serve", **arguments)
        result = self.reader.call("pull", **arguments)
        self._source.receive()
        result["cpu_seconds"] += self._source.call("cpu") - before
        return result

    def resume(self) -> None:
        """Its turn."""
        for child in self.children:
            child.resume()

    def rest(self) -> None:
        """Not its turn."""
        if self.stops_when_idle:
            for child in self.children:
                child.stop()

    def end(self) -> None:
        """Kill."""
        for child in self.children:
            child.end()
        self._source = self._reader = None
