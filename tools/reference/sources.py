# SPDX-License-Identifier: Apache-2.0
"""The syntax trees of `vllm_ascend_pd`, and what is looked for in them: strings, calls, classes."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "vllm_ascend_pd"
HOLE: Final = "\0"  # stands for a placeholder in a template


def module_paths(*folders: str) -> list[Path]:
    """The Python files of the package, or of some of its folders, sorted."""
    roots = [PACKAGE / folder for folder in folders] or [PACKAGE]
    files = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*.py"))]
    return sorted(path for path in files if "__pycache__" not in path.parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    """A file's tree."""
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """As written in the pages."""
    return path.relative_to(ROOT).as_posix()


def template(node: ast.expr) -> str | None:
    """The text of a string or f-string, HOLE for each placeholder; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else HOLE
            for part in node.values
        )
    return None


def called_name(call: ast.Call) -> str:
    """`f` of `f(…)` and of `x.f(…)`."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """All calls of functions of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) in names:
            yield node


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument by keyword, or by position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None


def text_argument(call: ast.Call, name: str, position: int | None = None) -> str | None:
    """The same, when it is a string or f-string."""
    found = argument(call, name, position)
    return None if found is None else template(found)


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of nodes that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            found.add(id(body[0].value))
    return found


def templates(tree: ast.Module) -> Iterator[str]:
    """All strings and f-strings that are not docstrings; the parts of an f-string are not given once more."""
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
        if isinstance(node, ast.expr) and id(node) not in skipped:
            text = template(node)
            if text is not None:
                yield text


def constants(tree: ast.Module) -> dict[str, str]:
    """Module-level names bound to a string."""
    found: dict[str, str] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found
