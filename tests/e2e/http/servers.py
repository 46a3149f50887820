# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` processes for a test session, and vllm-router from the package index in an environment of its own.

Every server is a process group of ours, logs into a file, and is told to stop by SIGTERM. The `vllm` is the one of
the environment that runs pytest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.models import MODELS, ensure_model
from tools.cache import compute_digest, get_cache_root, staging

MODEL = "gqa2"
MAX_MODEL_LEN = 512
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 40.0
ROUTER = ("vllm-router==0.1.17", "orjson")  # the router's launcher imports orjson and does not say so


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclasses.dataclass(frozen=True)
class Answer:
    """One HTTP exchange."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.text)


class Process:
    """A child in its own process group."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        base = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_PD_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env={**base, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # no session of its own: see docs/hardware-status.md, Six ranks on two cores
            )

    @property
    def pid(self) -> int:
        """Of the first process of the group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        """SIGTERM to the first process, as a supervisor sends it."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def log_tail(self, num_chars: int = 4000) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-num_chars:]


class Server(Process):
    """An HTTP server with JSON endpoints."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, folder: Path, env: dict[str, str] | None = None
    ) -> None:
        super().__init__(name, command, folder, env)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, timeout_s: float = 30) -> Answer:
        """GET."""
        return _exchange(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 90, headers: dict[str, str] | None = None) -> Answer:
        """POST of JSON (or of raw bytes)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **(headers or {})}, method="POST"
        )
        return _exchange(request, timeout_s)

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 90) -> Iterator[Any]:
        """The events of a streamed answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body | {"stream": True}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def status(self) -> Any:
        """/pd/status."""
        return self.get("/pd/status").json

    def metrics(self) -> dict[str, float]:
        """Prometheus samples, summed over `engine` and `model_name`; `name{label=value,…}`."""
        values: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("#") or " " not in line:
                continue
            sample, value = line.rsplit(" ", 1)
            name, _, labels = sample.partition("{")
            kept = [one for one in labels.rstrip("}").replace('"', "").split(",") if one and not _is_common(one)]
            key = f"{name}{{{','.join(kept)}}}"
            values[key] = values.get(key, 0.0) + float(value)
        return values

    def wait_healthy(self, deadline: float, path: str = "/health") -> None:
        """Until it answers 200; fails with the log when it ends or takes too long."""
        while True:
            if self.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.poll()}:\n{self.log_tail()}")
            try:
                if self.get(path, 5).status == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} is not healthy in time:\n{self.log_tail()}")
            time.sleep(0.25)


def _is_common(label: str) -> bool:
    return label.startswith(("engine=", "model_name="))


def _exchange(request: urllib.request.Request, timeout_s: float) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def serve_command(*arguments: str, model: str = MODEL, max_model_len: int = MAX_MODEL_LEN) -> list[str]:
    """`vllm serve` of a tiny model, small."""
    block = MODELS[model].block_size
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(ensure_model(model))),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
        *("--block-size", str(block), "--max-model-len", str(max_model_len), "--kv-cache-memory-bytes", "33554432"),
        *("--gpu-memory-utilization", "0.1", "--seed", "0", "--max-num-seqs", "16"),
        *arguments,
    ]


def serve_env(core: int) -> dict[str, str]:
    """One core each."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONUNBUFFERED": "1",
    }


def start_server(
    name: str,
    folder: Path,
    core: int,
    *arguments: str,
    executor: str | None = "uni",
    model: str = MODEL,
    env: dict[str, str] | None = None,
) -> Server:
    """Start `vllm serve` on a free port; returns at once. `arguments` win over the defaults.

    Upstream's default executor (None) has a worker process of its own, which imports everything once more. On CPU
    upstream takes "uni" only where its engine core would be in process (an API server's never is).
    """
    port = free_port()
    chosen = ("--distributed-executor-backend", executor) if executor else ()
    command = serve_command("--port", str(port), *chosen, *arguments, model=model)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if executor == "uni" else {}
    return Server(name, command, port, folder, {**serve_env(core), **settings, **(env or {})})


def ensure_router() -> str:
    """The `vllm-router` program, in an environment in the cache (it may not share ours: other dependencies)."""
    key = compute_digest(sys.executable, *ROUTER)[:16]
    folder = get_cache_root() / "environments" / f"vllm-router-{key}"
    program = folder / "bin" / "vllm-router"
    if not program.exists():
        with staging(folder.parent):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
            subprocess.run([*pip, *ROUTER], check=True)
    return str(program)


def start_router(folder: Path, prefill: Sequence[Server], decode: Sequence[Server]) -> Server:
    """The two-phase protocol of NixlConnector, driven by upstream's router."""
    port = free_port()
    urls = [word for server in prefill for word in ("--prefill", server.url)]
    urls += [word for server in decode for word in ("--decode", server.url)]
    command = [ensure_router(), "--vllm-pd-disaggregation", *urls, "--kv-connector", "nixl", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--policy", "round_robin", "--prometheus-port", str(free_port())]
    command += ["--disable-retries"]
    return Server(f"router-{port}", command, port, folder)
