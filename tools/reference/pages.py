# SPDX-License-Identifier: Apache-2.0
"""Which pages there are, writing them, and what differs from what is checked in."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools.reference import commands, endpoints, environment, errors, flags, handshake, metrics, sizes, status
from tools.reference.sources import ROOT

FOLDER: Final = ROOT / "docs/reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "flags.md": flags.render,
    "environment.md": environment.render,
    "metrics.md": metrics.render,
    "endpoints.md": endpoints.render,
    "status.md": status.render,
    "errors.md": errors.render,
    "handshake.md": handshake.render,
    "commands.md": commands.render,
    "kv-sizes.md": sizes.render,
}


def write_pages(folder: Path = FOLDER) -> list[str]:
    """Write all; the names of those that changed. A page of another name is removed: nobody writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, render in PAGES.items():
        path, text = folder / name, render()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(name)
    for path in folder.glob("*.md"):
        if path.name not in PAGES:
            path.unlink()
            changed.append(path.name)
    return changed


def find_drift(folder: Path = FOLDER) -> list[str]:
    """Unified diffs from what is checked in to what the code says; empty when they agree."""
    found = []
    for name, render in PAGES.items():
        path = folder / name
        old = path.read_text().splitlines() if path.exists() else []
        lines = list(
            difflib.unified_diff(old, render().splitlines(), f"docs/reference/{name}", "the code", lineterm="", n=0)
        )
        if lines:
            found.append("\n".join(lines))
    found += [
        f"docs/reference/{path.name}: no page of this name" for path in folder.glob("*.md") if path.name not in PAGES
    ]
    return found
