# SPDX-License-Identifier: Apache-2.0
"""Our inserted code: checked against the rules of an edit file, marked line by line, parsed.

A reader of site-packages finds the edit through the mark `# ascend-pd: <edit file>` on each line.
"""

from __future__ import annotations

import ast
import textwrap

import libcst as cst

from tools.fork.errors import EditInvalid
from tools.fork.ops import AddField, AddImport, InsertAfter, Op, ReplaceCallee, Return

MARK = "# ascend-pd: "
MAX_PAYLOAD_LINES = 3


def mark_for(edit_file: str) -> str:
    """The comment that ends each line which `edit_file` inserts."""
    return f"{MARK}{edit_file}"


def payload_lines(op: Op) -> int:
    """How many lines of ours `op` brings."""
    return len(op.code.strip().splitlines())


def check_op(op: Op, edit_file: str) -> None:
    """Refuse an operation that breaks the vocabulary.

    Raises:
        EditInvalid: no Python, too long, a string over several lines, or not what the operation needs.
    """
    lines = payload_lines(op)
    if not 1 <= lines <= MAX_PAYLOAD_LINES:
        raise EditInvalid(
            f"{edit_file}: {type(op).__name__}: the payload has {lines} lines, allowed are 1 to "
            f"{MAX_PAYLOAD_LINES}; move the code into vllm_ascend_pd and call it here"
        )
    source = textwrap.dedent(op.code).strip()
    try:
        tree: ast.AST = ast.parse(source, mode="eval") if isinstance(op, ReplaceCallee) else _wrapped(source)
    except SyntaxError as error:
        raise EditInvalid(f"{edit_file}: {type(op).__name__}: {error.msg}: {op.code!r}") from None
    body = tree.body if isinstance(tree, ast.Module) else []
    if isinstance(op, AddImport) and not all(isinstance(s, ast.Import | ast.ImportFrom) for s in body):
        raise EditInvalid(f"{edit_file}: AddImport: not an import: {op.code!r}")
    if isinstance(op, AddField) and not (len(body) == 1 and isinstance(body[0], ast.AnnAssign)):
        raise EditInvalid(f"{edit_file}: AddField: not one annotated assignment: {op.code!r}")
    if isinstance(op, InsertAfter) and isinstance(op.anchor, Return):
        raise EditInvalid(f"{edit_file}: InsertAfter(anchor=Return()) would insert code that never runs")


def _wrapped(source: str) -> ast.Module:
    """`source` parsed as in an async function, where `return`, `await` and `yield` are allowed."""
    tree = ast.parse("async def _():\n" + textwrap.indent(source, " "))
    function = tree.body[0]
    assert isinstance(function, ast.AsyncFunctionDef)
    return ast.Module(function.body, [])


def statements(op: Op, edit_file: str) -> list[cst.BaseStatement]:
    """The payload as statements ready to insert, each line marked.

    Raises:
        EditInvalid: a line cannot carry the mark (it ends inside a string or in a backslash).
    """
    mark = mark_for(edit_file)
    source = textwrap.dedent(op.code).strip()
    marked = "".join(f"{line.rstrip()}  {mark}\n" for line in source.splitlines())
    try:
        same = ast.dump(_wrapped(marked)) == ast.dump(_wrapped(source))
    except SyntaxError:
        same = False
    if not same:
        raise EditInvalid(
            f"{edit_file}: {type(op).__name__}: a line of the payload cannot carry the mark {mark!r} "
            f"(it ends inside a string or with a backslash): {op.code!r}"
        )
    found: list[cst.BaseStatement] = []
    for statement in cst.parse_module(marked).body:
        assert isinstance(statement, cst.SimpleStatementLine | cst.BaseCompoundStatement)
        found.append(statement)
    return found


def add_mark(line: cst.SimpleStatementLine, edit_file: str) -> cst.SimpleStatementLine:
    """`line` with the mark behind it, and behind its own comment where it has one."""
    return line.with_changes(trailing_whitespace=_marked(line.trailing_whitespace, edit_file))


def mark_call(call: cst.Call, edit_file: str) -> cst.Call | None:
    """`call` with the mark behind its opening parenthesis, where that ends a line; else None."""
    gap = call.whitespace_before_args
    if not isinstance(gap, cst.ParenthesizedWhitespace):
        return None
    return call.with_changes(whitespace_before_args=gap.with_changes(first_line=_marked(gap.first_line, edit_file)))


def _marked(tail: cst.TrailingWhitespace, edit_file: str) -> cst.TrailingWhitespace:
    mark = mark_for(edit_file)
    if tail.comment is not None:
        return tail.with_changes(comment=cst.Comment(f"{tail.comment.value}  {mark}"))
    return tail.with_changes(whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(mark))
