# SPDX-License-Identifier: Apache-2.0
"""Each operation and anchor on small sources: what is inserted, where, and what is refused."""

from __future__ import annotations

import textwrap

import pytest

from tools.fork import (
    AddField,
    AddImport,
    Append,
    Assignment,
    Call,
    Field,
    InsertAfter,
    InsertBefore,
    InsertFirst,
    Op,
    ReplaceCallee,
    Return,
    Yield,
)
from tools.fork.apply import apply_ops
from tools.fork.errors import AnchorLost, EditInvalid

MARK = "  # ascend-pd: x.edit.py"


def run(source: str, *ops: Op) -> str:
    return apply_ops(textwrap.dedent(source).encode(), ops, edit_file="x.edit.py", where="vllm/x.py of vLLM 1").decode()


def check_insert(source: str, op: Op, *, before: str | None = None, after: str | None = None) -> None:
    """The payload stands directly before or after the given line; without marked lines it is upstream again."""
    source = textwrap.dedent(source)
    lines = run(source, op).splitlines(keepends=True)
    own = [i for i, line in enumerate(lines) if line.endswith(MARK + "\n")]
    assert [lines[i].replace(MARK, "").strip() for i in own] == op.code.strip().splitlines()
    assert "".join(line for i, line in enumerate(lines) if i not in own) == source
    if before is not None:
        assert lines[own[-1] + 1].strip() == before
        assert _indent(lines[own[-1] + 1]) == _indent(lines[own[-1]])
    if after is not None:
        assert lines[own[0] - 1].strip() == after
    compile("".join(lines), "x", "exec")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


NESTED = """
class Engine:
    async def run(self, cfg):
        try:
            with lock:
                if cfg:
                    async for x in items:
                        first = await self.pool.take(x)
                else:
                    other(cfg, "name")
        except OSError:
            recover()
        else:
            settle()
        finally:
            while cfg:
                match cfg:
                    case 1:
                        clean()
        return done(first)
"""


@pytest.mark.parametrize(
    ("anchor", "line"),
    [
        (Call("take"), "first = await self.pool.take(x)"),
        (Call("self.pool.take"), "first = await self.pool.take(x)"),
        (Assignment("first"), "first = await self.pool.take(x)"),
        (Assignment("first", "pool.take"), "first = await self.pool.take(x)"),
        (Call("other", argument="name"), 'other(cfg, "name")'),
        (Call("recover"), "recover()"),
        (Call("settle"), "settle()"),
        (Call("clean"), "clean()"),
        (Call("done"), "return done(first)"),
        (Return(), "return done(first)"),
    ],
)
def test_anchor_is_found_at_any_depth_of_with_try_if_for_while_match(anchor, line):
    check_insert(NESTED, InsertBefore("hook()", scope="Engine.run", anchor=anchor), before=line)
    if not isinstance(anchor, Return):
        check_insert(NESTED, InsertAfter("hook()", scope="Engine.run", anchor=anchor), after=line)


@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("self.x = 1", "self.x"),
        ("self.x: int = 1", "self.x"),
        ("x: int = 1", "x"),
        ("x += 1", "x"),
        ("a = x = 1", "x"),
        ("a, (x, *b) = 1, (2, 3)", "x"),
        ("extra['pd'] = 1", 'extra["pd"]'),
        ("self.a[0].b = 1", "self.a[0].b"),
        ("extra[\n        'pd'\n    ] = 1", "extra['pd']"),
    ],
)
def test_assignment_to_name_attribute_item_annotated_chained_and_unpacked(statement, target):
    source = f"def f(self, extra):\n    pass\n    {statement}\n    other = extra\n"
    check_insert(source, InsertAfter("hook()", scope="f", anchor=Assignment(target)))
    check_insert(source, InsertBefore("hook()", scope="f", anchor=Assignment(target)), after="pass")


def test_assignment_with_a_callee_tells_two_assignments_to_one_name_apart():
    source = "def f():\n    x = None\n    x = make(1)\n"
    check_insert(source, InsertBefore("hook()", scope="f", anchor=Assignment("x", "make")), before="x = make(1)")
    with pytest.raises(AnchorLost, match="2 matches, want exactly 1"):
        run(source, InsertBefore("hook()", scope="f", anchor=Assignment("x")))


def test_callee_matches_whole_names_only():
    with pytest.raises(AnchorLost, match="0 matches"):
        run("def f():\n    remake()\n", InsertBefore("hook()", scope="f", anchor=Call("make")))


def test_argument_tells_two_calls_apart():
    source = "def f(p):\n    p.add('--a', help='x')\n    p.add('--b', help='--a2')\n"
    check_insert(
        source,
        InsertAfter("hook()", scope="f", anchor=Call("add", argument="--a")),
        after=source.split("\n")[1].strip(),
    )


@pytest.mark.parametrize("statement", ["yield x", "y = yield", "y = yield x", "yield from x"])
def test_yield_is_found_but_not_that_of_a_nested_function(statement):
    source = f"def f(x):\n    def inner():\n        yield 1\n    with x:\n        {statement}\n"
    check_insert(source, InsertBefore("hook()", scope="f", anchor=Yield()), before=statement)
    check_insert(source, InsertAfter("hook()", scope="f", anchor=Yield()), after=statement)


def test_return_of_a_nested_function_or_lambda_is_not_the_scopes_own():
    source = "def f(x):\n    def inner():\n        return 1\n    return inner\n"
    check_insert(source, InsertBefore("hook()", scope="f", anchor=Return()), before="return inner")
    check_insert(source, InsertBefore("hook()", scope="f.inner", anchor=Return()), before="return 1")


def test_field_of_a_class_with_its_docstring():
    source = 'class A:\n    """Doc."""\n\n    x: int = 1\n    """About x."""\n\n    y = 2\n'
    check_insert(source, AddField("z: int = 3", cls="A", after="x"), after='"""About x."""')
    check_insert(source, AddField("z: int = 3", cls="A", after="y"), after="y = 2")
    check_insert(source, InsertBefore("z: int = 3", scope="A", anchor=Field("x")), after='"""Doc."""')


def test_first_statement_goes_behind_the_docstring():
    check_insert('def f():\n    """Doc."""\n    # why\n    g()\n', InsertFirst("hook()", scope="f"), after='"""Doc."""')
    check_insert("async def f():\n    await g()\n", InsertFirst("await hook()", scope="f"), after="async def f():")
    check_insert("class A:\n    class B:\n        x = 1\n", InsertFirst("hook()", scope="A.B"), before="x = 1")


def test_import_goes_behind_the_first_block_of_imports():
    source = (
        '"""Doc."""\n\nfrom __future__ import annotations\n\n'
        "import os\nfrom a import b\n\nif os:\n    import c\nimport d\n"
    )
    check_insert(source, AddImport("from ours import x"), after="from a import b")
    check_insert('"""Doc."""\nx = 1\n', AddImport("import ours"), after='"""Doc."""')
    check_insert("x = 1\n", AddImport("import ours"), before="x = 1")


def test_append_goes_to_the_end():
    check_insert("x = 1\n\n\ndef f():\n    pass\n# end\n", Append("register(f)"))


def test_comment_above_the_anchor_stays_with_the_anchor():
    source = "def f():\n    a()\n\n    # about b\n    b()\n"
    check_insert(source, InsertBefore("hook()", scope="f", anchor=Call("b")), after="a()")


def test_payload_of_three_lines_keeps_its_shape_and_each_line_is_marked():
    op = InsertFirst("if hook(self):\n    return\nother(self)", scope="f")
    assert run("def f(self):\n    g()\n", op).splitlines() == [
        "def f(self):",
        f"    if hook(self):{MARK}",
        f"        return{MARK}",
        f"    other(self){MARK}",
        "    g()",
    ]


def test_replace_callee_keeps_the_arguments_and_marks_the_line_or_else_the_statement():
    source = "def f(n):\n    a = torch.zeros(\n        n, device=1\n    ).view(-1)\n    b = torch.ones(n)  # two\n"
    edited = run(
        source,
        ReplaceCallee("arena.take", scope="f", anchor=Call("torch.zeros")),
        ReplaceCallee("pd.ones", scope="f", anchor=Call("torch.ones")),
    )
    assert edited == source.replace("torch.zeros(", "arena.take(" + MARK).replace(
        "torch.ones(n)  # two", "pd.ones(n)  # two" + MARK
    )


@pytest.mark.parametrize(
    ("body", "count"), [("a = zeros(1) + zeros(2)", 2), ("a = zeros(1)\n    zeros(2)", 2), ("b = 1", 0)]
)
def test_replace_callee_wants_exactly_one_call(body, count):
    with pytest.raises(AnchorLost, match=f"{count} matches, want exactly 1"):
        run(f"def f():\n    {body}\n", ReplaceCallee("ours", scope="f", anchor=Call("zeros")))


def test_scope_is_the_whole_path_and_overloads_are_no_scope():
    source = """
    class A:
        @overload
        def f(self): ...
        @typing.overload
        def f(self): ...
        def f(self):
            go()
    class B:
        def f(self):
            go()
    """
    check_insert(source, InsertBefore("hook()", scope="A.f", anchor=Call("go")), before="go()")
    check_insert(source, InsertFirst("hook()", scope="A.f"), before="go()")


def test_scope_under_if_and_try_is_found():
    source = "if x:\n    pass\nelse:\n    try:\n        def f():\n            go()\n    except E:\n        pass\n"
    check_insert(source, InsertBefore("hook()", scope="f", anchor=Call("go")), before="go()")


@pytest.mark.parametrize(
    "source",
    ["def f():\n    a(); go()\n", "def f():\n    if a: go()\n", "def f(): go()\n", "def f():\n    if a: b(); go()\n"],
)
def test_anchor_that_shares_its_line_is_refused(source):
    with pytest.raises(AnchorLost, match="shares its line"):
        run(source, InsertBefore("hook()", scope="f", anchor=Call("go")))


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (InsertFirst("a()\nb()\nc()\nd()", scope="f"), "4 lines"),
        (InsertFirst("", scope="f"), "0 lines"),
        (InsertFirst("a(", scope="f"), "never closed"),
        (InsertFirst('a("""x\ny""")', scope="f"), "cannot carry the mark"),
        (InsertFirst("a + \\\nb", scope="f"), "cannot carry the mark"),
        (AddImport("x = 1"), "not an import"),
        (AddField("x = 1", cls="A", after="y"), "not one annotated assignment"),
        (ReplaceCallee("x = 1", scope="f", anchor=Call("a")), "invalid syntax"),
        (InsertAfter("a()", scope="f", anchor=Return()), "never runs"),
    ],
)
def test_operation_outside_the_vocabulary_is_refused(op, reason):
    with pytest.raises(EditInvalid, match=reason) as caught:
        run("def f():\n    return a()\n", op)
    assert "x.edit.py" in str(caught.value)


def test_layout_tabs_crlf_and_encoding_of_upstream_survive():
    source = "# -*- coding: latin-1 -*-\r\ndef f():\r\n\tx = 'ä'   \r\n\tgo( 1,2 )\r\n".encode("latin-1")
    edited = apply_ops(source, [InsertFirst("hook()", scope="f")], edit_file="x.edit.py", where="x")
    lines = edited.splitlines(keepends=True)
    assert lines.pop(2) == f"\thook(){MARK}\r\n".encode()
    assert b"".join(lines) == source
