# SPDX-License-Identifier: Apache-2.0
"""One engine in one process: commands come over a socket, the main thread runs them and steps the engine.

The in-process engine core has no input queue, so this loop stands in for `EngineCoreProc`: the connector's wake-up
writes a byte to a pipe, and the main thread then lets the connector drain, as the edit of `core.py` does.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

IDLE_STEP_S = 0.002  # while requests wait and nothing was scheduled


class EngineChild:
    """Commands are the methods `cmd_…`; each takes JSON and returns JSON."""

    def __init__(self, spec: dict[str, Any], channel: socket.socket) -> None:
        from vllm import LLM

        self._channel = channel
        self._send_lock = threading.Lock()
        self._buffer = b""
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK)
        self._running: dict[str, dict[str, Any]] = {}  # client's request id -> what is known
        self._closing = False
        self._paused = False
        self.llm = LLM(**spec["kwargs"])
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.half = self._find_half()
        if self.half is not None:
            self.half.set_wake(self._wake)

    def _find_half(self) -> Any:
        connector = self.scheduler.get_kv_connector()
        if connector is None:
            return None
        from vllm_ascend_pd.engine.hooks import pd_connector

        found = pd_connector(connector)
        return None if found is None else found.half

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"w")
        except BlockingIOError:
            pass

    # ---------------------------------------------------------------- the loop

    def serve(self) -> None:
        self._send({"event": "ready", "pid": os.getpid()})
        while not self._closing:
            busy = self._has_work()
            readable, _, _ = select.select([self._channel, self._wake_in], [], [], IDLE_STEP_S if busy else 0.5)
            if self._wake_in in readable:
                os.read(self._wake_in, 4096)
                if self.half is not None:
                    self.half.drain()
            if self._channel in readable and not self._receive():
                return
            while self._has_work():
                outputs = self.engine.step()
                for output in outputs:
                    self._take(output)
                if not outputs or select.select([self._channel], [], [], 0)[0]:
                    break

    def _has_work(self) -> bool:
        """An engine that was shut down may still have a finished request to tell its workers of."""
        if self._closing or self._paused:
            return False
        return bool(self.engine.has_unfinished_requests() or self.scheduler.has_requests())

    def _receive(self) -> bool:
        data = self._channel.recv(1 << 20)
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            try:
                result = getattr(self, f"cmd_{message['cmd']}")(**message["args"])
                self._send({"id": message["id"], "result": result})
            except Exception as error:
                traceback.print_exc()
                self._send({"id": message["id"], "error": f"{type(error).__name__}: {error}"})
        return True

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _take(self, output: Any) -> None:
        info = self._running.get(output.request_id)
        if info is None:
            return
        completion = output.outputs[0]
        if completion.token_ids and "first_token_s" not in info:
            info["first_token_s"] = time.monotonic() - info["started"]
        if not output.finished:
            return
        del self._running[output.request_id]
        self._send(
            {
                "event": "finished",
                "request_id": output.request_id,
                "result": {
                    "token_ids": list(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "kv_transfer_params": output.kv_transfer_params,
                    "num_cached_tokens": output.num_cached_tokens,
                    "first_token_s": info.get("first_token_s"),
                    "total_s": time.monotonic() - info["started"],
                },
            }
        )

    # ---------------------------------------------------------------- commands

    def cmd_submit(self, requests: list[dict[str, Any]]) -> dict[str, str]:
        """Add requests, all before the next step. Returns the engine's internal ids by the client's."""
        from vllm import SamplingParams

        internal = {}
        for request in requests:
            params = SamplingParams(**request["params"])
            self._running[request["request_id"]] = {"started": time.monotonic()}
            try:
                internal[request["request_id"]] = self.engine.add_request(
                    request["request_id"], {"prompt_token_ids": request["token_ids"]}, params
                )
            except Exception:
                del self._running[request["request_id"]]
                raise
        return internal

    def cmd_abort(self, request_ids: list[str]) -> None:
        """As a client's disconnect. Aborted requests give no `finished` event."""
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self.engine.abort_request(request_ids)

    def cmd_pause(self, paused: bool) -> None:
        """Stop stepping (a long step of other work), or go on."""
        self._paused = paused

    def cmd_status(self) -> dict[str, Any]:
        """The connector's status, what the scheduler holds, and the pool."""
        pool = self.scheduler.kv_cache_manager.block_pool
        status: dict[str, Any] = {
            "blocks": {"total": pool.num_gpu_blocks, "free": pool.get_num_free_blocks()},
            "requests": len(self.scheduler.requests),
            "busy": self.scheduler.has_requests(),
        }
        if self.half is not None:
            self.half.drain()
            status["blocks"]["free"] = pool.get_num_free_blocks()
            status["pd"] = self.half.status()
            status["problems"] = list(self.half.problems())
            status["peer_port"] = self.half.server.peer_port
            status["malformed"] = self.half.server.counters["malformed"]
            status["core_address"] = self.half.config.core_address
        return status

    def cmd_metrics(self) -> dict[str, float]:
        """Prometheus samples of this process by name and labels; counters and gauges only."""
        from prometheus_client import REGISTRY

        values: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in _COMMON_LABELS)
                values[f"{sample.name}{{{labels}}}"] = sample.value
        return values

    def cmd_corrupt_blocks(self, block_ids: list[int]) -> int:
        """Flip the sign of everything in these blocks, in every layer; returns the number of tensors."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        for tensor in runner.kv_caches:
            for block_id in block_ids:
                tensor[block_id].neg_()
        return len(runner.kv_caches)

    def cmd_reset_prefix_cache(self) -> bool:
        """Forget all cached blocks."""
        return bool(self.llm.reset_prefix_cache())

    def cmd_connector_names(self) -> list[str]:
        """Class names of the connector, or of the children of a MultiConnector."""
        connector = self.scheduler.get_kv_connector()
        return [type(child).__name__ for child in getattr(connector, "_connectors", [connector])]

    def cmd_record(self) -> dict[str, Any]:
        """The handshake record of this engine."""
        holder = self.half.prefill or self.half.decode.peers
        record: dict[str, Any] = holder._record
        return record

    def cmd_threads(self) -> list[str]:
        """Names of the threads that run here."""
        return sorted(thread.name for thread in threading.enumerate())

    def cmd_close(self) -> None:
        """Shut the engine down in order; the process ends after the answer."""
        self.engine.engine_core.shutdown()
        self._closing = True


_COMMON_LABELS = ("model_name", "engine")


def run_engine(spec: dict[str, Any]) -> int:
    """Build the engine of `spec` and serve its socket until close. Returns the exit code."""
    os.environ.update({"VLLM_CPU_OMP_THREADS_BIND": str(spec["core"]), **spec.get("env", {})})
    tempfile.tempdir = spec["tmp"]
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(spec["socket"])
    try:
        child = EngineChild(spec, channel)
    except BaseException as error:
        traceback.print_exc()
        message = {"event": "failed", "error": f"{type(error).__name__}: {error}"}
        channel.sendall(json.dumps(message).encode() + b"\n")
        return 3
    child.serve()
    print("engine closed", file=sys.stderr)
    return 0
