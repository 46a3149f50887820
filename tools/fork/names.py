# SPDX-License-Identifier: Apache-2.0
"""Do the names in an edited file exist? Undefined names by ruff (F821), and the modules of ours it imports.

Both compare with upstream's own state, so that a fault of upstream is not blamed on an edit.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from tools.fork.delta import PACKAGE

_TIMEOUT_S = 60.0


def find_ruff() -> str | None:
    """The ruff of this environment or of PATH; None where there is none."""
    beside = Path(sys.executable).with_name("ruff")
    return str(beside) if beside.is_file() else shutil.which("ruff")


@lru_cache(maxsize=64)
def undefined_names(source: bytes, ruff: str) -> frozenset[str]:
    """What ruff's F821 says about a module, without positions."""
    command = [ruff, "check", "--isolated", "--select", "F821", "--output-format", "json", "--exit-zero"]
    command += ["--ignore-noqa", "--no-cache", "--stdin-filename", "edited.py", "-"]
    done = subprocess.run(command, input=source, capture_output=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        return frozenset({f"ruff failed: {done.stderr.decode(errors='replace').strip()}"})
    return frozenset(str(finding["message"]) for finding in json.loads(done.stdout))


def missing_imports(edited: bytes, upstream: bytes, ours: dict[str, bytes]) -> list[str]:
    """The imports that an edit added of modules or names that our delta does not define.

    Args:
        edited: the module after the edits.
        upstream: the module before.
        ours: our files by installed path: `vllm_ascend_pd` and the new modules below `vllm/`.
    """
    new = _imported(edited) - _imported(upstream)
    found = []
    for module, name in sorted(new):
        path = module.replace(".", "/")
        if not module.startswith((PACKAGE, "vllm.")) or (module.startswith("vllm.") and not _ours(path, ours)):
            continue
        source = ours.get(f"{path}.py", ours.get(f"{path}/__init__.py"))
        if source is None:
            if not any(file.startswith(f"{path}/") for file in ours):
                found.append(f"no module {module}")
        elif name and name != "*" and name not in _defined(source) and not _ours(f"{path}/{name}", ours):
            found.append(f"{module} does not define {name}")
    return found


def _ours(path: str, ours: dict[str, bytes]) -> bool:
    return f"{path}.py" in ours or f"{path}/__init__.py" in ours


def _imported(source: bytes) -> set[tuple[str, str]]:
    """(module, name) of each absolute import in a module, at any depth; name is empty for `import x`."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update((node.module, alias.name) for alias in node.names)
    return found


def _defined(source: bytes) -> set[str]:
    """The names that a module binds at its top level, also under if, try and with."""
    found: set[str] = set()
    todo: list[ast.AST] = list(ast.parse(source).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            todo.extend(ast.iter_child_nodes(node))
    return found
