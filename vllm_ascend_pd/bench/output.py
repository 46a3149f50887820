# SPDX-License-Identifier: Apache-2.0
"""Where results go: checked before the work starts, written at its end."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_ascend_pd.errors import PDConfigError

FORMAT_VERSION = 1
_LOG_WIDTH = 140  # of tables that go to a file: there is no terminal to fit
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Raises PDConfigError for what would fail after minutes of measuring."""
    for flag, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.resolve().parent.is_dir():
            raise PDConfigError(f"{flag}: {path.resolve().parent} is not a folder")
    if plot_path is None:
        return
    if plot_path.suffix not in PLOT_SUFFIXES:
        raise PDConfigError(f"--plot: {plot_path} must end in one of {', '.join(PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PDConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """One file, keys in our order."""
    path.write_text(json.dumps(document, indent=1) + "\n")


def make_console() -> Console:
    """For the tables, on stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)
