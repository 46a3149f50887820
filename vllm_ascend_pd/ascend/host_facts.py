# SPDX-License-Identifier: Apache-2.0
"""Reads from this host what `pairing.py` judges: metadata of distributions, version files, `npu-smi`.

Imports neither torch nor vllm-ascend (both would open the devices, or fail where CANN is missing). Formats of the
version files: `key=value` lines, the key in any case. Runs in the command's main process. Not run on an NPU.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.ascend.pairing import PairingFacts, check_pairing, get_generation, refuse_unpaired

logger = logging.getLogger(__name__)

DEVICE_FILE: Final = "dev/davinci_manager"
DRIVER_FILE: Final = "usr/local/Ascend/driver/version.info"
CANN_HOMES: Final = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "usr/local/Ascend/latest")
_TIMEOUT_S: Final = 20.0

Run = Callable[[Sequence[str]], str]


def run_tool(command: Sequence[str]) -> str:
    """What a tool prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def refuse_unpaired_host(root: Path = Path("/"), **sources: Any) -> None:
    """On a host with NPUs: log which versions were only tried differently, stop a start with those that do not fit.

    `sources` are those of `collect_facts`.

    Raises:
        PDConfigError: one line for each thing, with what to do.
    """
    if not has_npu_devices(root):
        return
    verdicts = check_pairing(collect_facts(root=root, **sources))
    for verdict in verdicts:
        if verdict.level == "warn":
            logger.warning("pd: %s", verdict)
    refuse_unpaired(verdicts)


def get_installed(project: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect_facts(
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    installed: Callable[[str], str | None] = get_installed,
    run: Run = run_tool,
    chip: str | None = None,
) -> PairingFacts:
    """The facts of this host. `chip` (A2, A3) is asked of `npu-smi` where the caller does not know it."""
    has_npu = has_npu_devices(root)
    return PairingFacts(
        has_npu=has_npu,
        python=(sys.version_info[0], sys.version_info[1]),
        distribution=installed("vllm"),
        vllm_version_override=environ.get("VLLM_VERSION") or None,
        vllm_ascend=installed("vllm-ascend"),
        vllm_ascend_chip=read_built_chip(),
        torch=installed("torch"),
        torch_npu=installed("torch-npu"),
        triton=installed("triton"),
        triton_ascend=installed("triton-ascend"),
        cann=read_cann_version(root, environ),
        driver=read_key(root / DRIVER_FILE, "version"),
        chip=chip or (ask_chip(run) if has_npu else None),
    )


def has_npu_devices(root: Path = Path("/")) -> bool:
    """Whether the driver's device file is there (also in a container that was given devices)."""
    return (root / DEVICE_FILE).exists()


def read_key(path: Path, key: str) -> str | None:
    """The value of `key=value` in a file; of a list `[7.6.0.1:8.3.RC2]` the last part, the version of the product."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(rf"^\s*{re.escape(key)}\s*=\s*[\"'\[]?([^\"'\]\s]+)", text, re.MULTILINE | re.IGNORECASE)
    return found[1].rpartition(":")[2] or None if found else None


def read_cann_version(root: Path, environ: Mapping[str, str]) -> str | None:
    """CANN's version from its install record, its version file, or the name of the folder that it lies in."""
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    homes = [Path(home)] if home else [root / name for name in CANN_HOMES]
    for folder in homes:
        for name in (f"{platform.machine()}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info"):
            if version := read_key(folder / name, "version"):
                return version
        for key in ("toolkit_running_version", "toolkit_installed_version", "version"):
            if version := read_key(folder / "version.cfg", key):
                return version
        if found := re.search(r"(\d+\.\d+(?:\.\w+)*)$", folder.resolve().name):
            return found[1]
    return None


def read_built_chip(search: Sequence[str] | None = None) -> str | None:
    """For which chip vllm-ascend was built: `__device_type__` of its `_build_info.py`, read without importing it."""
    for entry in sys.path if search is None else search:
        path = Path(entry or ".") / "vllm_ascend" / "_build_info.py"
        if path.is_file():
            return read_key(path, "__device_type__")
    return None


def ask_chip(run: Run = run_tool) -> str | None:
    """The chip family of the first NPU, by `npu-smi`; None where it does not say."""
    first = re.search(r"NPU ID\s*:\s*(\d+)", run(["npu-smi", "info", "-l"]))
    board = ["npu-smi", "info", "-t", "board", "-i", first[1] if first else "0"]
    for command in (board, [*board, "-c", "0"]):
        text = run(command)
        chip = re.search(r"Chip Name\s*:\s*(\S+)", text)
        if chip is None:
            continue
        npu = re.search(r"NPU Name\s*:\s*(\S+)", text)
        return get_generation(chip[1], npu[1] if npu else "")
    return None
