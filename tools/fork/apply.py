# SPDX-License-Identifier: Apache-2.0
"""Apply the operations of one edit file to the source of one upstream file.

Works on a libcst tree, so that upstream's layout and comments stay byte for byte. Every operation must
match exactly once, else `AnchorLost` says what stands there now. Pure: bytes in, bytes out.
`payload.py` makes the inserted statements, `anchors.py` matches, `nearest.py` explains a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from tools.fork import nearest
from tools.fork.anchors import callee_matches, is_docstring, is_field, is_import, is_overload, matches
from tools.fork.errors import AnchorLost
from tools.fork.ops import (
    AddField,
    AddImport,
    Append,
    InsertAfter,
    InsertBefore,
    InsertFirst,
    Op,
    ReplaceCallee,
    Return,
    Yield,
    scope_of,
)
from tools.fork.payload import add_mark, check_op, mark_call, statements

Statements = Sequence[cst.BaseStatement]


def apply_ops(source: bytes, ops: Sequence[Op], *, edit_file: str, where: str) -> bytes:
    """`source` with all `ops` applied in order; `where` names upstream file and release for errors.

    Raises:
        EditInvalid: an operation breaks the vocabulary.
        AnchorLost: an operation does not match exactly once.
    """
    module = cst.parse_module(source)
    for op in ops:
        check_op(op, edit_file)
        module = _apply_one(module, op, edit_file, where)
    return module.bytes


def _apply_one(module: cst.Module, op: Op, edit_file: str, where: str) -> cst.Module:
    if isinstance(op, ReplaceCallee):
        replacer = _CalleeReplacer(op, edit_file)
        edited = _edit_scopes(module, op.scope, lambda scope: _visit(scope, replacer))
        hits = replacer.hits
    else:
        new = statements(op, edit_file)
        if isinstance(op, AddImport):
            return _add_import(module, new)
        if isinstance(op, Append):
            return module.with_changes(body=[*module.body, *new])
        inserter = _Inserter(op, new)
        edited = _edit_scopes(module, scope_of(op) or "", inserter.edit_scope)
        hits = inserter.hits
        if inserter.shared_line:
            raise AnchorLost(f"{edit_file}: {op}\n  in {where}: the anchor shares its line with other code")
    if hits != 1:
        raise AnchorLost(nearest.explain(module, op, edit_file=edit_file, where=where, hits=hits))
    return edited


def _add_import(module: cst.Module, new: Statements) -> cst.Module:
    """Behind the first block of imports, or the docstring where there is none."""
    at = 0
    for i, node in enumerate(module.body):
        if not is_import(node) and not (i == 0 and is_docstring(node)):
            break
        at = i + 1
    return module.with_changes(body=[*module.body[:at], *new, *module.body[at:]])


Scope = cst.ClassDef | cst.FunctionDef


def _edit_scopes(module: cst.Module, scope: str, edit: Callable[[Scope], Scope]) -> cst.Module:
    """`module` with `edit` applied to each definition of the dotted path `scope`."""
    edited = _descend(module, tuple(scope.split(".")), edit)
    assert isinstance(edited, cst.Module)
    return edited


def _descend(node: cst.CSTNode, path: tuple[str, ...], edit: Callable[[Scope], Scope]) -> cst.CSTNode:
    def visit(statement: cst.CSTNode) -> list[cst.CSTNode]:
        if not isinstance(statement, cst.ClassDef | cst.FunctionDef):
            return [map_blocks(statement, lambda block: map_block(block, visit))]
        if statement.name.value != path[0] or _only_signature(statement):
            return [statement]
        if len(path) == 1:
            return [edit(statement)]
        return [_descend(statement, path[1:], edit)]

    if isinstance(node, cst.Module):
        return map_block(node, visit)
    return map_blocks(node, lambda block: map_block(block, visit))


def _only_signature(statement: Scope) -> bool:
    return isinstance(statement, cst.FunctionDef) and is_overload(statement.decorators)


def map_blocks(node: cst.CSTNode, edit: Callable[[cst.CSTNode], cst.CSTNode]) -> cst.CSTNode:
    """`node`, a compound statement or a clause of one, with `edit` applied to each block of statements."""
    changes: dict[str, object] = {}
    body = getattr(node, "body", None)
    if isinstance(body, cst.IndentedBlock | cst.SimpleStatementSuite):
        changes["body"] = edit(body)
    for name in ("orelse", "finalbody"):
        clause = getattr(node, name, None)
        if isinstance(clause, cst.CSTNode) and not isinstance(clause, cst.BaseExpression):
            changes[name] = map_blocks(clause, edit)
    for name in ("handlers", "cases"):
        clauses = getattr(node, name, None)
        if clauses is not None:
            changes[name] = [map_blocks(clause, edit) for clause in clauses]
    return node.with_changes(**changes) if changes else node


def map_block(block: cst.CSTNode, edit: Callable[[cst.CSTNode], list[cst.CSTNode]]) -> cst.CSTNode:
    """A module, block or one-line suite with each of its statements replaced by what `edit` gives for it."""
    body: Sequence[cst.CSTNode] = block.body  # type: ignore[attr-defined]
    return block.with_changes(body=[new for old in body for new in edit(old)])


class _Inserter:
    """Inserts `new` where `op` says inside each scope it is given, and counts the places."""

    def __init__(self, op: Op, new: Statements) -> None:
        self.op, self.new = op, list(new)
        self.hits = 0
        self.shared_line = False

    def edit_scope(self, scope: Scope) -> Scope:
        if isinstance(self.op, InsertFirst):
            edited = map_blocks(scope, self._first)
        elif isinstance(self.op, AddField):
            edited = map_blocks(scope, self._field)
        else:
            edited = map_blocks(scope, lambda block: map_block(block, self._around))
        assert isinstance(edited, cst.ClassDef | cst.FunctionDef)
        return edited

    def _first(self, block: cst.CSTNode) -> cst.CSTNode:
        self.hits += 1
        if not isinstance(block, cst.IndentedBlock):
            self.shared_line = True
            return block
        at = 1 if is_docstring(block.body[0]) else 0
        return block.with_changes(body=[*block.body[:at], *self.new, *block.body[at:]])

    def _field(self, block: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(self.op, AddField)
        if not isinstance(block, cst.IndentedBlock):
            return block
        body: list[cst.CSTNode] = []
        waits = False
        for statement in block.body:
            if waits and not is_docstring(statement):
                body.extend(self.new)
            elif waits:
                body.append(statement)
                body.extend(self.new)
                waits = False
                continue
            body.append(statement)
            waits = isinstance(statement, cst.SimpleStatementLine) and is_field(statement.body[0], self.op.after)
            self.hits += waits
        return block.with_changes(body=[*body, *(self.new if waits else ())])

    def _around(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        assert isinstance(self.op, InsertBefore | InsertAfter)
        if isinstance(node, cst.BaseSmallStatement):  # `if x: return` on one line
            self._count([node], shared=True)
            return [node]
        if not isinstance(node, cst.SimpleStatementLine):
            own_only = isinstance(self.op.anchor, Return | Yield)
            if own_only and isinstance(node, cst.ClassDef | cst.FunctionDef):
                return [node]
            return [map_blocks(node, lambda block: map_block(block, self._around))]
        if not self._count(node.body, shared=len(node.body) > 1):
            return [node]
        return [node, *self.new] if isinstance(self.op, InsertAfter) else [*self.new, node]

    def _count(self, smalls: Sequence[cst.BaseSmallStatement], *, shared: bool) -> int:
        assert isinstance(self.op, InsertBefore | InsertAfter)
        found = sum(matches(small, self.op.anchor) for small in smalls)
        self.hits += found
        self.shared_line = self.shared_line or (shared and found > 0)
        return found


class _CalleeReplacer(cst.CSTTransformer):
    """Puts our callee in the place of the anchor's, marks the statement, counts the calls."""

    def __init__(self, op: ReplaceCallee, edit_file: str) -> None:
        super().__init__()
        self.op, self.edit_file = op, edit_file
        self.hits = 0
        self._callee = cst.parse_expression(op.code.strip())
        self._unmarked: list[int] = []

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Start counting the replaced calls of this statement that carry no mark yet."""
        self._unmarked.append(0)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        """Mark the statement where one of its calls was replaced and could not be marked itself."""
        return add_mark(updated_node, self.edit_file) if self._unmarked.pop() else updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Replace the callee of a matching call in a simple statement."""
        if not self._unmarked or not callee_matches(original_node, self.op.anchor):
            return updated_node
        self.hits += 1
        replaced = updated_node.with_changes(func=self._callee)
        marked = mark_call(replaced, self.edit_file)
        self._unmarked[-1] += marked is None
        return marked or replaced


def _visit(scope: Scope, replacer: _CalleeReplacer) -> Scope:
    edited = scope.visit(replacer)
    assert isinstance(edited, cst.ClassDef | cst.FunctionDef)
    return edited
