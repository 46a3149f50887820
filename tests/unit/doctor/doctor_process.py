# SPDX-License-Identifier: Apache-2.0
"""A doctor in a process of its own, through its command line, if need be with a fault; run as a script by `Doctor`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_S = 60


class Doctor:
    """`vllm pd doctor ARGUMENTS --json`, waiting."""

    def __init__(self, *arguments: str, fault: str = "none", environ: dict[str, str] | None = None) -> None:
        command = [sys.executable, __file__, fault, *arguments, "--json"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
        self.process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.report: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.port = 0

    def wait_listening(self) -> int:
        self.report = self._read()
        event = self._read()
        assert event["event"] == "listening"
        self.port = event["port"]
        return self.port

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        document: dict[str, Any] = json.loads(line)
        return document

    def end(self, timeout_s: float = 30.0) -> int:
        """Wait for its end, and collect what it told."""
        out, _ = self.process.communicate(timeout=timeout_s)
        self.events += [json.loads(line) for line in out.splitlines()]
        return self.process.returncode

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.end()


def _inject(fault: str) -> None:
    from vllm_ascend_pd.doctor.peer import listener, pattern, plane

    fill = plane.DoctorPlane._fill

    def damage(self, memory) -> None:
        """One byte of one block."""
        fill(self, memory)
        offset = self._geometry.offset(3, 1) + 17
        memory.write(offset, bytes([memory.read(offset, 1)[0] ^ 1]))

    def misplace(self, memory) -> None:
        """Blocks 0 and 1 of tensor 2 change places."""
        fill(self, memory)
        size = self._geometry.block_bytes
        for block, other in ((0, 1), (1, 0)):
            memory.write(self._geometry.offset(2, block), pattern.block_bytes(self._seed, 2, other, size))

    def empty(self, memory) -> None:
        memory.clear()

    if fault == "impatient":
        listener.IDLE_MARGIN_S = 0.5
        return
    if fault == "die":
        plane.DoctorPlane.pull = lambda self, peer: os._exit(9)
        return
    plane.DoctorPlane._fill = {"none": fill, "damage": damage, "misplace": misplace, "empty": empty}[fault]


if __name__ == "__main__":
    _inject(sys.argv[1])
    from vllm_ascend_pd.doctor.cli import main

    sys.exit(main(sys.argv[2:]))
