# SPDX-License-Identifier: Apache-2.0
"""A whole worker half over the stand-in of CANN's package, as a process of its own: `tests/unit/engine/worker_side.py`
in a world where the package is installed and a device is there. The tensors are on CPU; nothing ran on an NPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.unit.engine.worker_side import Side
from tests.unit.engine.worker_side import main as run_half
from tests.unit.transfer.cann_rank import ROOT, device


class CannSide(Side):
    """In the parent. `release` of CANN decides how the two are linked."""

    def __init__(self, folder: Path, release: str, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", __name__, json.dumps({"folder": str(folder), **options})]
        environ = {**os.environ, "STANDIN_CANN": release}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
        )
        self.told = self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    from vllm_ascend_pd import datadist
    from vllm_ascend_pd.datadist import choose

    choose._DEVICE_FILES = "/dev/null"  # type: ignore[misc]
    datadist.own_device = lambda *args: device(1 if args[4] == "prefill" else 2)
    run_half()


if __name__ == "__main__":
    main()
