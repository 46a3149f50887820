# SPDX-License-Identifier: Apache-2.0
"""The pytest side of the zygote: start engines, send them requests, ask for their state.

One reader thread per engine resolves futures; everything else runs on the test's thread. Every wait has a deadline
and fails with the tail of the engine's log.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORT_TIMEOUT_S = 300.0  # of vLLM, with others at work on the machine
START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 90.0


class EngineFailure(AssertionError):
    """An engine answered a command with an error, did not answer, or died."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished request."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None
    num_cached_tokens: int | None
    first_token_s: float | None
    total_s: float


class Engine:
    """One forked engine. `ready()` waits until it can take requests."""

    def __init__(self, name: str, pid: int, listener: socket.socket, log: Path) -> None:
        self.name, self.pid, self.log = name, pid, log
        self._listener = listener
        self._channel: socket.socket | None = None
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._finished: dict[str, Future[Result]] = {}
        self._ready: Future[None] = Future()
        self.internal_ids: dict[str, str] = {}
        self._thread = threading.Thread(target=self._read, name=f"engine-{name}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- requests

    def submit(self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]) -> list[str]:
        """Add requests, all before the engine's next step. Returns their ids, for `wait` and `abort`."""
        requests = []
        for token_ids, sampling in zip(prompts, params, strict=True):
            request_id = f"{self.name}-{next(self._ids)}"
            self._finished[request_id] = Future()
            requests.append({"request_id": request_id, "token_ids": list(token_ids), "params": sampling})
        self.internal_ids |= self.call("submit", requests=requests)
        return [request["request_id"] for request in requests]

    def wait(self, request_ids: Sequence[str], timeout_s: float = REQUEST_TIMEOUT_S) -> list[Result]:
        """Results in the order of the ids."""
        deadline = time.monotonic() + timeout_s
        return [self._result(self._finished[request_id], deadline, request_id) for request_id in request_ids]

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]) -> list[Result]:
        """Submit together and wait for all."""
        return self.wait(self.submit(prompts, params))

    def abort(self, request_ids: Sequence[str]) -> None:
        """As if the clients had gone."""
        self.call("abort", request_ids=list(request_ids))

    # ---------------------------------------------------------------- state

    def status(self) -> dict[str, Any]:
        """See `EngineChild.cmd_status`."""
        status: dict[str, Any] = self.call("status")
        return status

    def total(self, name: str) -> Any:
        """One of the connector's totals."""
        return self.status()["pd"]["totals"].get(name, 0)

    def free_blocks(self) -> int:
        """Blocks that are free now."""
        return int(self.status()["blocks"]["free"])

    def wait_until(self, condition: Any, what: str, timeout_s: float = 15.0) -> dict[str, Any]:
        """Poll the status until `condition(status)`; returns it."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            if time.monotonic() > deadline:
                raise EngineFailure(f"{self.name}: not within {timeout_s} s: {what}; status {status}")
            time.sleep(0.05)

    def wait_for_free_blocks(self, count: int, timeout_s: float = 15.0) -> None:
        """Blocks come back within this time."""
        self.wait_until(lambda s: s["blocks"]["free"] == count, f"{count} free blocks", timeout_s)

    def call(self, cmd: str, **args: Any) -> Any:
        """One command of the child."""
        self.ready()
        future: Future[Any] = Future()
        number = next(self._ids)
        self._pending[number] = future
        assert self._channel is not None
        with self._lock:
            try:
                self._channel.sendall(json.dumps({"id": number, "cmd": cmd, "args": args}).encode() + b"\n")
            except OSError as error:
                raise self._failure(f"{cmd}: {error}") from error
        return self._result(future, time.monotonic() + COMMAND_TIMEOUT_S, cmd)

    # ---------------------------------------------------------------- life

    def ready(self, timeout_s: float = START_TIMEOUT_S) -> Engine:
        """Wait until the engine takes requests."""
        self._result(self._ready, time.monotonic() + timeout_s, "start")
        return self

    def start_error(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The error with which it refused to start."""
        try:
            self._ready.result(timeout_s)
        except EngineFailure as error:
            return str(error)
        raise AssertionError(f"{self.name} started, it should have refused")

    def is_alive(self) -> bool:
        """Whether its socket is open."""
        return self._thread.is_alive()

    def kill(self) -> None:
        """kill -9, and nothing else."""
        os.kill(self.pid, signal.SIGKILL)
        self._thread.join(10)

    def close(self) -> None:
        """Shut down in order; kill what does not."""
        if self._thread.is_alive():
            try:
                self.call("close")
            except (EngineFailure, OSError):
                pass
            self._thread.join(20)
        if self._thread.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            self._thread.join(5)
        self._listener.close()

    def log_tail(self, num_chars: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-num_chars:] if self.log.exists() else ""

    # ---------------------------------------------------------------- reader thread

    def _read(self) -> None:
        self._listener.settimeout(START_TIMEOUT_S)
        reason = "its socket closed"
        try:
            self._channel, _ = self._listener.accept()
            for line in self._channel.makefile("r", encoding="utf-8", newline="\n"):
                self._take(json.loads(line))
        except OSError as error:
            reason = str(error)
        failure = self._failure(f"has ended: {reason}")
        for future in (self._ready, *self._pending.values(), *self._finished.values()):
            if not future.done():
                future.set_exception(failure)

    def _take(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "ready":
            self._ready.set_result(None)
        elif event == "failed":
            self._ready.set_exception(EngineFailure(message["error"]))
        elif event == "finished":
            values = message["result"]
            result = Result(**{**values, "token_ids": tuple(values["token_ids"])})
            self._finished[message["request_id"]].set_result(result)
        elif "error" in message:
            self._pending.pop(message["id"]).set_exception(EngineFailure(message["error"]))
        else:
            self._pending.pop(message["id"]).set_result(message["result"])

    def _result(self, future: Future[Any], deadline: float, what: str) -> Any:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise self._failure(f"{what}: no answer in time") from None

    def _failure(self, text: str) -> EngineFailure:
        return EngineFailure(f"engine {self.name} (pid {self.pid}): {text}\n--- {self.log}\n{self.log_tail()}")


class Zygote:
    """The process that imported vLLM. Start it lazily; `close` ends it and what is left of its engines."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pdt-", dir="/tmp"))  # short: socket paths end at 107 bytes
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_PD_") or k == "VLLM_PD_CACHE"}
        env.pop("VLLM_PD_CACHE", None)
        env |= {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(self.folder / "state"), "PYTHONUNBUFFERED": "1"}
        self.log = self.folder / "zygote.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.zygote", str(theirs.fileno())],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
            )
        theirs.close()
        ours.settimeout(IMPORT_TIMEOUT_S)
        self._stream = ours.makefile("rw", encoding="utf-8", newline="\n")
        self._count = itertools.count()
        self._engines: list[Engine] = []
        self._read()

    def _read(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise EngineFailure(f"the zygote has ended:\n{self.log.read_text(errors='replace')[-3000:]}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()
        return self._read()

    def start(self, name: str, kwargs: dict[str, Any], core: int = 0, env: dict[str, str] | None = None) -> Engine:
        """Fork an engine with these `LLM` arguments. Returns at once; `ready()` waits."""
        number = next(self._count)
        folder = self.folder / f"{number}"
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "s"))
        listener.listen(1)
        log = folder / f"{name}.log"
        spec = {
            "kwargs": kwargs,
            "core": core % (os.cpu_count() or 1),
            "env": env or {},
            "log": str(log),
            "tmp": str(folder),
            "socket": str(folder / "s"),
        }
        pid = self._ask({"op": "fork", "spec": spec})["pid"]
        engine = Engine(name, pid, listener, log)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """End everything that this object started."""
        for engine in self._engines:
            engine.close()
        self._ask({"op": "reap"})
        self._stream.close()
        self._process.kill()
        self._process.wait(10)
        if os.environ.get("PD_KEEP_LOGS") is None:
            shutil.rmtree(self.folder, ignore_errors=True)
