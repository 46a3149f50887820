# SPDX-License-Identifier: Apache-2.0
"""Explain a lost anchor: what was wanted, how often it was found, and what stands there now.

Read-only, and only run when an edit has already failed, so it may be slow.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from tools.fork.anchors import callee_matches, is_field, matches, targets_of, text_of, value_of
from tools.fork.ops import (
    AddField,
    Anchor,
    Assignment,
    Call,
    Field,
    InsertAfter,
    InsertBefore,
    Op,
    ReplaceCallee,
    scope_of,
)

MAX_SHOWN = 4


@dataclass(frozen=True)
class Standing:
    """A simple statement inside the scope: where it is, how it starts, what it calls and assigns."""

    line: int
    text: str
    small: cst.BaseSmallStatement
    calls: tuple[cst.Call, ...]


def explain(module: cst.Module, op: Op, *, edit_file: str, where: str, hits: int) -> str:
    """The message for an operation that matched `hits` times in `where` (upstream file and release)."""
    standing, scopes = _statements_in(module, scope_of(op) or "")
    lines = [f"{edit_file}: {describe(op)}", f"  in {where}: {hits} matches, want exactly 1"]
    if hits:
        shown = [s for s in standing if _is_hit(s, op)] or standing[:0]
        title = "it matches all of these"
    elif not scopes:
        return "\n".join([*lines, f"  the scope {scope_of(op)!r} is not defined there"])
    else:
        shown = _resembling(standing, op)
        title = "what stands there now" if shown else f"nothing like it stands in {scope_of(op)!r} now"
    lines.append(f"  {title}{':' if shown else ''}")
    lines += [f"    line {s.line}: {s.text}" for s in shown[:MAX_SHOWN]]
    if len(shown) > MAX_SHOWN:
        lines.append(f"    … and {len(shown) - MAX_SHOWN} more")
    if scopes > 1:
        lines.append(f"  the scope {scope_of(op)!r} is defined {scopes} times in that file")
    return "\n".join(lines)


def describe(op: Op) -> str:
    """The operation in one line: kind, scope, anchor."""
    name = type(op).__name__
    if isinstance(op, AddField):
        return f"{name} in class {op.cls!r} after field {op.after!r}"
    if isinstance(op, InsertBefore | InsertAfter | ReplaceCallee):
        return f"{name} in {op.scope!r} at {op.anchor}"
    return f"{name} in {scope_of(op)!r}" if scope_of(op) else name


class _Collector(cst.CSTVisitor):
    """All simple statements inside the definitions of one dotted path, with their calls."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, scope: tuple[str, ...]) -> None:
        super().__init__()
        self.scope, self.path = scope, [""][:0]
        self.standing: list[Standing] = []
        self.scopes = 0

    def _enter(self, node: cst.ClassDef | cst.FunctionDef) -> bool:
        self.path.append(node.name.value)
        self.scopes += tuple(self.path) == self.scope
        n = min(len(self.path), len(self.scope))
        return tuple(self.path[:n]) == self.scope[:n]

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        """Descend only towards the scope and inside it."""
        return self._enter(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """Descend only towards the scope and inside it."""
        return self._enter(node)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        """Step back out."""
        self.path.pop()

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        """Step back out."""
        self.path.pop()

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        """Note the statements of a line that is in scope."""
        if tuple(self.path[: len(self.scope)]) == self.scope:
            line = self.get_metadata(PositionProvider, node).start.line
            for small in node.body:
                text = cst.Module([]).code_for_node(small).strip()
                first = text.splitlines()[0]
                shown = first if first == text else f"{first} …"
                self.standing.append(Standing(line, shown, small, tuple(_calls(small))))
        return False


def _statements_in(module: cst.Module, scope: str) -> tuple[list[Standing], int]:
    collector = _Collector(tuple(scope.split(".")))
    MetadataWrapper(module).visit(collector)
    return collector.standing, collector.scopes


def _calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    if isinstance(node, cst.Call):
        yield node
    for child in node.children:
        yield from _calls(child)


def _is_hit(standing: Standing, op: Op) -> bool:
    if isinstance(op, ReplaceCallee):
        return any(callee_matches(call, op.anchor) for call in standing.calls)
    if isinstance(op, AddField):
        return is_field(standing.small, op.after)
    return isinstance(op, InsertBefore | InsertAfter) and matches(standing.small, op.anchor)


def _resembling(standing: list[Standing], op: Op) -> list[Standing]:
    """The statements whose callee or target is spelled most like the anchor's, in file order."""
    if isinstance(op, AddField):
        anchor: Anchor = Field(op.after)
    elif isinstance(op, InsertBefore | InsertAfter | ReplaceCallee):
        anchor = op.anchor
    else:
        return []
    wants = [w for w in (getattr(anchor, n, None) for n in ("target", "callee", "name", "argument")) if w]
    scored = [(max(_likeness(s, str(w), anchor) for w in wants), s) for s in standing] if wants else []
    best = sorted((p for p in scored if p[0] >= 0.6), key=lambda p: -p[0])[:MAX_SHOWN]
    return sorted((s for _, s in best), key=lambda s: s.line)


def _likeness(standing: Standing, want: str, anchor: Anchor) -> float:
    names = targets_of(standing.small)
    if isinstance(anchor, Call | Assignment):
        names = names + [text_of(call.func) for call in standing.calls]
        names = names + [n.rpartition(".")[2] for n in names]
    if isinstance(anchor, Call) and anchor.argument is not None:
        value = value_of(standing.small)
        args = value.args if isinstance(value, cst.Call) else ()
        names = names + [text_of(a.value).strip("'\"") for a in args]
    return max((difflib.SequenceMatcher(None, n, want).ratio() for n in names), default=0.0)
