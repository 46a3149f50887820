# SPDX-License-Identifier: Apache-2.0
"""Unpacks vllm-ascend's Python beside lane ascend-cpu's environment and runs `beside_probe.py` there.

The environment holds vLLM 0.23.0 with our edits and all that it needs; vllm-ascend comes from its sdist, compared with
its hash, and is only put on the path. Minutes on a busy machine, so it is no part of `make test`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final

from tools.ascend.sources import SDIST
from tools.cache import get_cache_root, publish, staging
from tools.fork.cache import require
from tools.fork.delta import REPO
from tools.fork.index import Index

PROBE: Final = Path(__file__).with_name("beside_probe.py")
_FOLDERS: Final = ("vllm_ascend/", "vllm_ascend.egg-info/")  # the latter names its plug-ins for vLLM


def unpack(index: Index | None) -> Path:
    """The folder with vllm-ascend's Python, in the cache under the sdist's hash."""
    final = get_cache_root() / "vllm-ascend" / SDIST.sha256[:16]
    if final.is_dir():
        return final
    with staging(final.parent) as folder, tarfile.open(require(SDIST, index), "r:gz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if not (member.isfile() and name.startswith(_FOLDERS)) or ".." in Path(name).parts:
                continue
            stream = archive.extractfile(member)
            assert stream is not None
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("wb") as out:
                shutil.copyfileobj(stream, out)
        publish(folder, final)
    return final


def run_probe(python: Path, sources: Path) -> int:
    """The probe's exit status; what it found is on the terminal."""
    variables = {
        **os.environ,
        "PYTHONPATH": f"{sources}{os.pathsep}{REPO}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(python), str(PROBE)]
    return subprocess.run(command, cwd=get_cache_root(), env=variables, check=False).returncode
