# SPDX-License-Identifier: Apache-2.0
"""The table of docs/datadist.md and the tests name each other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/datadist.md").read_text()
RULE = re.compile(r"\d(?:\.\d)?-\d\d")
PRODUCED = (
    "LLM_SUCCESS LLM_FAILED LLM_KV_CACHE_NOT_EXIST LLM_PARAM_INVALID LLM_NOT_YET_LINK LLM_ALREADY_LINK LLM_LINK_FAILED "
    "LLM_UNLINK_FAILED LLM_EXIST_LINK LLM_FEATURE_NOT_ENABLED LLM_TIMEOUT LLM_OUT_OF_MEMORY"
)  # by the V2 engine


def read_table(header):
    """Rows of the table with that header line, as lists of cells."""
    lines = TEXT.split(header + "\n")[1].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("| "):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@cache
def find_tests(path):
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def resolve(name):
    """`pull::test_x` is in this folder, `unit/test_links::test_x` with the tests of the data plane."""
    file, function = name.split("::")
    place = ROOT / "tests/unit/datadist" / f"{file[5:]}.py" if file.startswith("unit/") else None
    return place or ROOT / "tests/contract" / f"test_{file}.py", function


RULES = {row[0]: re.findall(r"`([^`]+)`", row[2]) for row in read_table("| rule | what holds | tests |")}


def test_each_rule_has_tests_that_exist():
    missing = []
    for rule, names in RULES.items():
        for path, function in map(resolve, names):
            if not path.exists() or function not in find_tests(path):
                missing.append((rule, function))
    assert missing == []
    assert [rule for rule, names in RULES.items() if not names] == []
    assert len(RULES) > 100


def test_rules_are_in_order_and_named_once():
    ids = [row[0] for row in read_table("| rule | what holds | tests |")]
    assert all(RULE.fullmatch(rule) for rule in ids)
    assert ids == sorted(set(ids), key=lambda rule: [float(part) for part in rule.split("-")])


def test_each_test_of_the_suite_belongs_to_a_rule():
    named = {name for names in RULES.values() for name in names}
    present = {
        f"{path.stem[5:]}::{name}"
        for path in (ROOT / "tests/contract").glob("test_*.py")
        for name in find_tests(path)
        if path != Path(__file__)
    }
    assert sorted(present - named) == []


def test_decisions_name_rules_that_exist():
    rules = [row[0] for row in read_table("| rule | the real engine | ours |")]
    assert [rule for rule in rules if rule not in RULES] == []
    assert all(len(row) == 3 and all(row) for row in read_table("| rule | the real engine | ours |"))


def test_each_status_code_is_reached_by_a_rule_whose_tests_name_it():
    codes = {row[0]: RULE.findall(row[1]) for row in read_table("| code | rules |")}
    assert set(codes) == set(PRODUCED.split())
    for code, rules in codes.items():
        sources = [resolve(name) for rule in rules for name in RULES[rule]]
        texts = [read_source(path, function) for path, function in sources]
        names = f"{code}|OK" if code == "LLM_SUCCESS" else code
        wanted = re.compile(rf"\b({names})\b")
        assert any(wanted.search(text) for text in texts), code


def read_source(path, function):
    """A test's text with its decorators."""
    text = path.read_text()
    node = next(node for node in ast.parse(text).body if getattr(node, "name", None) == function)
    first = min([decorator.lineno for decorator in node.decorator_list] + [node.lineno])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
