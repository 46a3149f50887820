# SPDX-License-Identifier: Apache-2.0
"""Does a statement match an anchor? Pure functions over libcst nodes, used by `apply.py` and `nearest.py`.

Expressions are compared in the form that `ast.unparse` gives, so quotes and line breaks do not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache

import libcst as cst

from tools.fork.ops import Anchor, Assignment, Call, Field, Return, Yield

_PRINTER = cst.Module([])


@lru_cache(maxsize=65536)
def canonical(code: str) -> str:
    """The expression `code` as `ast.unparse` writes it; unchanged where it does not parse alone."""
    if code.isidentifier():
        return code
    try:
        return ast.unparse(ast.parse(code, mode="eval"))
    except SyntaxError:
        return code


def text_of(node: cst.CSTNode) -> str:
    """`node` as source in canonical form."""
    return canonical(_PRINTER.code_for_node(node).strip())


def callee_matches(call: cst.Call, anchor: Call | Assignment) -> bool:
    """Whether the callee ends in the anchor's dotted name and the call carries the anchor's argument."""
    want = anchor.callee
    if want is None:
        return True
    want = canonical(want)
    callee = text_of(call.func)
    if callee != want and not callee.endswith("." + want):
        return False
    argument = anchor.argument if isinstance(anchor, Call) else None
    return argument is None or any(string_value(a.value) == argument for a in call.args)


def string_value(node: cst.BaseExpression) -> str | None:
    """The value of a plain string literal (adjacent literals joined), else None."""
    if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def value_of(small: cst.BaseSmallStatement) -> cst.BaseExpression | None:
    """The expression that a statement is, assigns or returns; awaits and yields are looked through."""
    value: cst.BaseExpression | None = None
    if isinstance(small, cst.Expr | cst.Assign | cst.AnnAssign | cst.AugAssign | cst.Return):
        value = small.value
    while True:
        if isinstance(value, cst.Await):
            value = value.expression
        elif isinstance(value, cst.Yield) and isinstance(value.value, cst.BaseExpression):
            value = value.value
        elif isinstance(value, cst.Yield) and isinstance(value.value, cst.From):
            value = value.value.item
        else:
            return value


def targets_of(small: cst.BaseSmallStatement) -> list[str]:
    """What a statement assigns to, each in canonical form; the parts of an unpacking one by one."""
    if isinstance(small, cst.Assign):
        nodes: list[cst.BaseExpression] = [t.target for t in small.targets]
    elif isinstance(small, cst.AnnAssign | cst.AugAssign):
        nodes = [small.target]
    else:
        return []
    found: list[str] = []
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, cst.Tuple | cst.List):
            nodes[:0] = [e.value for e in node.elements]
        else:
            found.append(text_of(node))
    return found


def matches(small: cst.BaseSmallStatement, anchor: Anchor) -> bool:
    """Whether one simple statement is what `anchor` names; the caller has checked that it is in scope."""
    if isinstance(anchor, Return):
        return isinstance(small, cst.Return)
    if isinstance(anchor, Yield):
        return _yields(small)
    if isinstance(anchor, Field):
        return is_field(small, anchor.name)
    value = value_of(small)
    if isinstance(anchor, Assignment):
        if canonical(anchor.target) not in targets_of(small):
            return False
        return anchor.callee is None or (isinstance(value, cst.Call) and callee_matches(value, anchor))
    return isinstance(value, cst.Call) and callee_matches(value, anchor)


def _yields(small: cst.BaseSmallStatement) -> bool:
    value = small.value if isinstance(small, cst.Expr | cst.Assign | cst.AnnAssign | cst.AugAssign) else None
    if isinstance(value, cst.Await):
        value = value.expression
    return isinstance(value, cst.Yield)


def is_field(small: cst.BaseSmallStatement, name: str) -> bool:
    """Whether the statement is the assignment, annotated or not, of field `name`."""
    if isinstance(small, cst.AnnAssign):
        return isinstance(small.target, cst.Name) and small.target.value == name
    return isinstance(small, cst.Assign) and targets_of(small) == [name]


def is_docstring(node: cst.CSTNode | None) -> bool:
    """Whether a statement is a lone string: a docstring of a module, class, function or field."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    small = node.body[0]
    return isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString | cst.ConcatenatedString)


def is_import(node: cst.CSTNode) -> bool:
    """Whether a statement line holds imports only."""
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(small, cst.Import | cst.ImportFrom) for small in node.body
    )


def is_overload(decorators: Sequence[cst.Decorator]) -> bool:
    """Whether a function is only an `@overload` signature, which is no scope of its own."""
    return any(text_of(d.decorator).rpartition(".")[2] == "overload" for d in decorators)
