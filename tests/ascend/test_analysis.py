# SPDX-License-Identifier: Apache-2.0
"""The analysis itself, on small trees: what replaces what, what goes on into the original, what binds."""

from __future__ import annotations

import ast

import pytest

from tools.ascend.check import Crossing, review_faults
from tools.ascend.hooks import BASES, binding_fault, faults, find_hook_calls, load_hooks, narrowed
from tools.ascend.modules import Modules
from tools.ascend.overrides import ANY, Override, find_overrides
from tools.ascend.reviewed import NotNeeded, Refused, Wraps

VLLM = {
    "vllm/__init__.py": b"",
    "vllm/core/__init__.py": b"from vllm.core.sched import Sched\n",
    "vllm/core/sched.py": b"class Base:\n    def start(self): ...\n\nclass Sched(Base):\n    def step(self): ...\n",
    "vllm/tool.py": b"def make(): ...\n",
}


def overrides_of(text, name="patch.py"):
    modules = Modules({**VLLM, f"vllm_ascend/{name}": text.encode()})
    return {(o.place, o.kind, o.continues) for o in find_overrides(modules)}


STEP = ("vllm.core.sched", "Sched.step")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from vllm.core.sched import Sched\nclass A(Sched):\n    def step(self): ...", {(STEP, "subclass", False)}),
        (
            "import vllm.core.sched as s\nclass A(s.Sched):\n    def step(self):\n        return super().step()",
            {(STEP, "subclass", True)},
        ),
        ("from vllm.core import Sched as S\nS.step = lambda self: 1", {(STEP, "assigns", False)}),
        ("import vllm\nvllm.core.sched.Sched.step = None", {(STEP, "assigns", False)}),
        (
            "from vllm.core.sched import Sched\n_old = Sched.step\ndef new(self): _old(self)\nSched.step = new",
            {(STEP, "assigns", True)},
        ),
        (
            "from vllm.core.sched import Sched\ndef install():\n    setattr(Sched, 'step', 3)",
            {(STEP, "assigns", False)},
        ),
        ("import sys\nm = sys.modules.get('vllm.tool')\nm.make = 3", {(("vllm.tool", "make"), "assigns", False)}),
        ("import sys\nsys.modules['vllm.tool'] = 3", {(("vllm.tool", ""), "assigns", False)}),
        (
            "import vllm.core.sched as s\nclass B(s.Sched): ...\ns.Sched = B",
            {(("vllm.core.sched", "Sched"), "assigns", True)},
        ),
        (
            "import vllm.core.sched as s\nclass B: ...\ns.Sched = B",
            {(("vllm.core.sched", "Sched"), "assigns", False)},
        ),
        ("def install(cls):\n    def new(self): ...\n    cls.step = new", {((ANY, "step"), "assigns", False)}),
        ("class Own:\n    def step(self):\n        self.step = 1", set()),
        ("import torch\ntorch.step = lambda: 1", set()),
    ],
)
def test_replacements_are_found_through_aliases_lookups_and_reexports(text, expected):
    assert overrides_of(text) == expected


def test_a_subclass_of_a_subclass_replaces_the_methods_of_all_its_ancestors():
    text = "from vllm.core.sched import Sched\nclass A(Sched): ...\nclass B(A):\n    def start(self): ..."
    places = {place for place, _, _ in overrides_of(text)}
    assert places == {("vllm.core.sched", "Base.start")}


@pytest.mark.parametrize(
    ("place", "scope", "covers"),
    [
        (("vllm.core.sched", "Sched.step"), "Sched.step", True),
        (("vllm.core.sched", "Sched"), "Sched.step", True),
        (("vllm.core.sched", ""), "Sched.step", True),
        (("vllm.core.sched", "Sched.step"), "Sched.start", False),
        (("vllm.core.sched", "Sched.step"), "Sched", False),
        (("vllm.other", "Sched.step"), "Sched.step", False),
        ((ANY, "step"), "Sched.step", True),
    ],
)
def test_a_replaced_class_covers_its_methods_but_a_method_only_itself(place, scope, covers):
    assert Override("x", place, "assigns", False).covers("vllm.core.sched", scope) is covers


def crossing(*, continues=False):
    return Crossing("a.edit.py", "Sched.step", Override("p.py:Sched.step", STEP, "assigns", continues))


KEY = ("a.edit.py", "Sched.step", "p.py:Sched.step")


def test_a_crossing_must_be_reviewed_and_the_review_must_be_true():
    assert "nobody has looked at it" in review_faults([crossing()], {})[0]
    assert "but it does not" in review_faults([crossing()], {KEY: Wraps("x")})[0]
    assert review_faults([crossing(continues=True)], {KEY: Wraps("x")}) == []
    assert "together.py does not have" in review_faults([crossing()], {KEY: Refused("no-such-rule")})[0]
    assert review_faults([crossing()], {KEY: Refused("kv-nz")}) == []
    assert review_faults([crossing()], {KEY: NotNeeded("x")}) == []
    assert "does not occur any more" in review_faults([], {KEY: NotNeeded("x")})[0]


@pytest.mark.parametrize(
    ("signature", "positional", "keywords", "said"),
    [
        ("self, a, b", 2, (), ""),
        ("self, a, b", 3, (), "takes 2 arguments, is given 3"),
        ("self, a, b", 1, (), "is not given b"),
        ("self, a, b", 1, ("b",), ""),
        ("self, a, b", 2, ("b",), "gets b twice"),
        ("self, a, b=1", 1, (), ""),
        ("self, a", 1, ("c",), "does not know c"),
        ("self, a, **k", 1, ("c",), ""),
        ("self, *a", 5, (), ""),
        ("self, *, a", 0, (), "is not given a"),
        ("self, *, a=1", 0, ("a",), ""),
    ],
)
def test_arguments_are_bound_as_python_binds_them(signature, positional, keywords, said):
    function = ast.parse(f"def f({signature}): ...").body[0]
    assert binding_fault(function, positional, keywords) == said


BASE = """
class KVConnectorBase_V1:
    prefer = False
    def __init__(self, x): self._x = x
    def bind(self, a, b=1): ...
    def only_base(self, a): ...
class SupportsHMA: ...
"""
OURS = "class DataDistConnector(KVConnectorBase_V1):\n    def bind(self, a{more}): ...\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("self.connector.bind(1, b=2)", ""),
        ("get_kv_transfer_group().only_base(1)", ""),
        ("def f():\n    c = get_kv_transfer_group()\n    c.gone()", "uses gone"),
        ("def f():\n    c = get_kv_transfer_group()\ndef g(c):\n    c.gone()", ""),
        ("self.connector.bind()", "is not given a"),
        ("if self.connector.prefer: ...", ""),
        ("if self.connector.unheard_of: ...", "uses unheard_of"),
        ("self.other.gone()", ""),
    ],
)
def test_hooks_that_are_missing_or_do_not_bind_are_named(code, said):
    modules = Modules({f"{BASES[0][0].replace('.', '/')}.py": BASE.encode(), "vllm_ascend/runner.py": code.encode()})
    hooks = load_hooks(modules, OURS.format(more=", b=1").encode())
    found = faults(find_hook_calls(modules), hooks)
    assert len(found) == (1 if said else 0)
    assert said in "".join(found)


def test_a_method_that_takes_less_than_the_base_promises_is_named():
    modules = Modules({f"{BASES[0][0].replace('.', '/')}.py": BASE.encode()})
    assert narrowed(load_hooks(modules, OURS.format(more=", b=1").encode()), modules) == []
    assert narrowed(load_hooks(modules, OURS.format(more="").encode()), modules)[0].startswith("bind: takes 1")
