# SPDX-License-Identifier: Apache-2.0
"""The delta on one upstream tree: which file each edit means, and its new bytes. Pure but for reading.

`UPSTREAM` candidates resolve by which file defines the scopes, not by which exists: a module that moved
may live on at its old path as a shim. Each upstream file is parsed once per edit file that changes it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import lru_cache

from tools.fork.apply import apply_ops
from tools.fork.delta import EditFile
from tools.fork.errors import AnchorLost
from tools.fork.ops import Op, scope_of
from tools.fork.source import UpstreamTree


@dataclass
class Patched:
    """What an edit run did: `files` maps changed paths to bytes, `steps` one edit file to (path, bytes)."""

    files: dict[str, bytes] = field(default_factory=dict)
    steps: list[tuple[EditFile, str, bytes]] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)


def patch_tree(tree: UpstreamTree, edits: list[EditFile], *, keep_going: bool = False) -> Patched:
    """Apply all edits that are meant for the tree's release, in order.

    With `keep_going`, an edit that fails is noted in `failures` and leaves its file as it was.

    Raises:
        AnchorLost: an edit does not apply (without `keep_going`).
    """
    done = Patched()
    for edit in edits:
        if not edit.applies_to(tree.release):
            continue
        try:
            path = resolve(tree, edit)
            source = done.files[path] if path in done.files else tree.read(path)
            assert source is not None
            where = f"{path} of vLLM {tree.release}"
            edited = _apply(source, edit.ops, edit.path, where)
        except Exception as error:
            if not keep_going:
                raise
            done.failures[edit.path] = error
            continue
        done.files[path] = edited
        done.steps.append((edit, path, edited))
    return done


@lru_cache(maxsize=64)
def _apply(source: bytes, ops: tuple[Op, ...], edit_file: str, where: str) -> bytes:
    """`apply_ops`, compiled; kept, because lanes of one release have the same files and parsing is slow."""
    edited = apply_ops(source, ops, edit_file=edit_file, where=where)
    try:
        compile(edited, where, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise AnchorLost(f"{edit_file}: {where} does not compile with this edit: {error}") from None
    return edited


def resolve(tree: UpstreamTree, edit: EditFile) -> str:
    """The one candidate of `edit.upstream` that defines all scopes of its operations.

    Raises:
        AnchorLost: none or several do; says for each candidate what it lacks, and where the scope went.
    """
    needed = sorted({scope for op in edit.ops if (scope := scope_of(op)) is not None})
    fit: list[str] = []
    lacks: list[str] = []
    for path in edit.upstream:
        source = tree.read(path)
        if source is None:
            lacks.append(f"{path}: no such file")
            continue
        missing = [scope for scope in needed if scope not in defined_scopes(source)]
        if missing:
            lacks.append(f"{path}: does not define {', '.join(missing)}")
        else:
            fit.append(path)
    if len(fit) == 1:
        return fit[0]
    if fit:
        raise AnchorLost(
            f"{edit.path}: several files of vLLM {tree.release} define its scopes "
            f"({len(fit)} matches, want exactly 1): {', '.join(fit)}"
        )
    lines = [f"{edit.path}: no upstream file of vLLM {tree.release} fits (0 matches, want exactly 1)"]
    lines += [f"  {line}" for line in lacks]
    lines += _where_now(tree, needed, edit.upstream)
    raise AnchorLost("\n".join(lines))


def defined_scopes(source: bytes) -> set[str]:
    """The dotted paths of all classes and functions in a module, at any depth of if, try and with."""
    found: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                walk(child, prefix)

    walk(ast.parse(source), "")
    return found


def _where_now(tree: UpstreamTree, needed: list[str], asked: tuple[str, ...]) -> list[str]:
    """For each scope that a person will look for: the other files that define it now."""
    lines = []
    for scope in needed:
        last = scope.rpartition(".")[2].encode()
        definition = re.compile(rb"^\s*(?:async\s+def|def|class)\s+" + re.escape(last) + rb"\b", re.M)
        paths = []
        for path in tree.names():
            if path.endswith(".py") and path not in asked:
                source = tree.read(path) or b""
                if definition.search(source) and scope in defined_scopes(source):
                    paths.append(path)
        if paths:
            lines.append(f"  {scope} is defined now in: {', '.join(paths[:4])}")
    return lines
