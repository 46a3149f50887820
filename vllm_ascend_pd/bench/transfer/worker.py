# SPDX-License-Identifier: Apache-2.0
"""A contender's process: `python -m vllm_ascend_pd.bench.transfer.worker JOB`, driven by JSON lines.

Runs in the environment of the peer, so it and what it imports need the standard library only. Commands come one at a
time on stdin, an answer to each goes to what was stdout; whatever libraries print goes to stderr, which the driver
keeps in a file. One thread. The process dies with its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.pool import count_huge_bytes
from vllm_ascend_pd.bench.transfer.contenders import base
from vllm_ascend_pd.bench.transfer.geometry import Geometry, draw_request, shift

PATTERN_SEED = 20_25
_PR_SET_PDEATHSIG = 1


class VerifyError(Exception):
    """A byte is not what it must be."""


class Worker:
    """Runs commands on one contender."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        module = importlib.import_module(f"vllm_ascend_pd.bench.transfer.contenders.{job['module']}")
        geometry = Geometry(**job["geometry"])
        self.job = base.Job(job["role"], geometry, tuple(job["pieces"]), job["options"], job["num_threads"])
        self.contender: base.Contender = module.Contender(self.job)
        if self.job.role == base.SOURCE or job["num_processes"] == 1:
            native.fill(self.contender.source_address, geometry.pool_bytes, PATTERN_SEED)

    def hello(self) -> Any:
        """Source: what the reader needs."""
        return self.contender.hello()

    def accept(self) -> Any:
        """Source: meet the reader."""
        self.contender.accept()
        return None

    def connect(self, hello: Mapping[str, Any]) -> Any:
        """Reader: link; what a person should know."""
        facts = self.contender.connect(hello)
        return {**facts, "pool bytes in huge pages": count_huge_bytes(self.contender.address)}

    def variants(self, piece: int) -> Any:
        """Settings to choose from."""
        return self.contender.variants(piece)

    def pull(self, piece: int, seed: int, variant: str) -> Any:
        """Reader: move, then verify every byte, then poison. Only the contender's own part is timed."""
        request = draw_request(self.job.geometry, piece, seed)
        cpu_before = time.process_time()
        timing = self.contender.pull(request, variant)
        cpu_seconds = time.process_time() - cpu_before
        if self.job.options.get("corrupt"):  # a test's way to see that a wrong byte is found
            ctypes.memset(self.contender.address + request.dst_offsets[-1] + piece - 1, 0x5A, 1)
        targets, origins, size = request.dst_offsets, request.src_offsets, piece
        if self.job.options.get("contiguous"):
            targets, origins, size = targets[:1], origins[:1], request.num_bytes
        targets = shift(targets, self.contender.address)
        wrong = native.find_wrong_byte(targets, origins, size, PATTERN_SEED)
        if wrong is not None:
            raise VerifyError(f"byte {wrong} of {request.num_bytes} is wrong: pieces of {piece} bytes, seed {seed}")
        native.poison(targets, size)
        return {"seconds": timing.seconds, "posting_seconds": timing.posting_seconds, "cpu_seconds": cpu_seconds}

    def serve(self, piece: int, seed: int, variant: str) -> Any:
        """Source: take part in a pull."""
        self.contender.serve(draw_request(self.job.geometry, piece, seed), variant)
        return None

    def cpu(self) -> Any:
        """CPU seconds of all threads so far."""
        return time.process_time()

    def check_untouched(self) -> Any:
        """Reader: after its pulls were verified and poisoned, the whole pool is poison, or somebody wrote outside."""
        found = native.find_unpoisoned_byte(self.contender.address, self.job.geometry.pool_bytes)
        if found is not None:
            raise VerifyError(f"byte {found} of the pool was written, but belongs to no pull")
        return None

    def close(self) -> Any:
        """End connections."""
        self.contender.close()
        return None


COMMANDS = ("hello", "accept", "connect", "variants", "pull", "serve", "cpu", "check_untouched", "close")


def answer(worker: Worker, line: str) -> dict[str, Any]:
    """Run one command; an exception becomes an answer."""
    message = json.loads(line)
    name = message.pop("command")
    try:
        if name not in COMMANDS:
            raise ValueError(f"no command {name!r}")
        return {"result": getattr(worker, name)(**message)}
    except Exception as error:  # the driver drops this contender and goes on
        return _describe(error)


def _describe(error: Exception) -> dict[str, Any]:
    kind = "not installed" if isinstance(error, base.NotInstalledError) else "failed"
    kind = "wrong bytes" if isinstance(error, VerifyError) else kind
    return {"error": f"{type(error).__name__}: {error}", "kind": kind}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit(1)


def main() -> None:
    """Answer until stdin ends."""
    _die_with_parent()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    try:
        worker = Worker(json.loads(sys.argv[1]))
        first: dict[str, Any] = {"result": None}
    except Exception as error:  # reported like any other
        first = _describe(error)
    out.write(json.dumps(first) + "\n")
    if "error" in first:
        return
    for line in sys.stdin:
        out.write(json.dumps(answer(worker, line)) + "\n")
        if json.loads(line)["command"] == "close":
            out.close()
            os._exit(0)  # peers' libraries crash or hang in their destructors now and then


if __name__ == "__main__":
    main()
