# SPDX-License-Identifier: Apache-2.0
"""Size limits: 400 lines a file, 60 a function, 7 parameters. `make check` runs it; it prints every excess.

A limit may be passed with a written reason in `ALLOWED`, never by raising it. An entry that is not needed any more is
an error too, so the list cannot rot.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("vllm", "vllm_ascend_pd", "csrc_npu", "tools", "tests", "examples")
SUFFIXES: Final = {".py", ".pyi", ".cpp", ".h"}
MAX_FILE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60
MAX_PARAMETERS: Final = 7

# "path" for a file, "path:Class.function" for a function -> why it may be larger.
ALLOWED: Final[dict[str, str]] = {
    "vllm_ascend_pd/npu/triton_kernels.py:copy_pieces": "a kernel's arguments are its interface, constants included",
}


@dataclass(frozen=True)
class Excess:
    """One thing over a limit."""

    key: str
    line: int
    what: str


def measure_file(path: Path, name: str) -> Iterator[Excess]:
    """Everything in one file that is over a limit."""
    text = path.read_text()
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield Excess(name, 1, f"{num_lines} lines, the limit for a file is {MAX_FILE_LINES}")
    if path.suffix == ".py":
        yield from _measure_scope(ast.parse(text), name, "")


def _measure_scope(scope: ast.AST, file: str, prefix: str) -> Iterator[Excess]:
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _measure_scope(node, file, prefix)
            continue
        path = f"{prefix}.{node.name}".lstrip(".")
        if not isinstance(node, ast.ClassDef):
            yield from _measure_function(node, f"{file}:{path}")
        yield from _measure_scope(node, file, path)


def _measure_function(node: ast.FunctionDef | ast.AsyncFunctionDef, key: str) -> Iterator[Excess]:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > MAX_FUNCTION_LINES:
        yield Excess(key, node.lineno, f"{num_lines} lines, the limit for a function is {MAX_FUNCTION_LINES}")
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    num_parameters = len(names) - (names[:1] in (["self"], ["cls"]))
    if num_parameters > MAX_PARAMETERS:
        yield Excess(key, node.lineno, f"{num_parameters} parameters, the limit is {MAX_PARAMETERS}")


def list_files(root: Path) -> Iterator[Path]:
    """All our sources, in a stable order."""
    for folder in FOLDERS:
        yield from sorted(path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file())


def find_problems(root: Path, allowed: dict[str, str]) -> list[str]:
    """One line per excess without a reason, and per reason without an excess."""
    found = [x for path in list_files(root) for x in measure_file(path, path.relative_to(root).as_posix())]
    problems = [f"{x.key.partition(':')[0]}:{x.line}: {x.key}: {x.what}" for x in found if not allowed.get(x.key)]
    unused = sorted(set(allowed) - {x.key for x in found})
    return problems + [f"tools/size_limits.py: {key} is within the limits, remove it from ALLOWED" for key in unused]


def main() -> int:
    """Exit code 1 when there is a problem."""
    problems = find_problems(ROOT, ALLOWED)
    print("\n".join(problems) or "size limits: all kept")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
