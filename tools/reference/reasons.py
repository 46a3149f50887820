# SPDX-License-Identifier: Apache-2.0
"""The words that become values of the `reason` labels, found in the syntax trees: a new one cannot be forgotten."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.reference.sources import (
    HOLE,
    PACKAGE,
    called_name,
    calls,
    docstrings,
    module_paths,
    name_of,
    parse,
    template,
    text_argument,
)
from vllm_ascend_pd.transfer.lease import UNKNOWN, LeaseState

_FRONT: Final = ("front/front.py", "front/remote.py", "front/hooks.py")
_LOADING: Final = ("transfer", "engine/decode.py")
_WORD: Final = re.compile(r"[a-z][a-z_]*(>1)?")
_HEAD: Final = re.compile(r"([a-z][a-z_]*): ")
_LOGGING: Final = ("debug", "info", "warning", "error", "exception", "critical")
# Heads of sentences that are no reason of a load.
_NO_REASONS: Final = frozenset({"dead", "stuck", "not_measured"})


@functools.cache
def find_fallback_reasons() -> dict[str, str]:
    """Reason -> file, in the order: front door, asks, loads."""
    found: dict[str, str] = {}
    for word, file in _front_words():
        found.setdefault(word, file)
    for word, file in _ask_words():
        found.setdefault(f"ask_{word}", file)
    for word, file in sorted(_load_words()):
        found.setdefault(f"load_{word}", file)
    return found


def _front_words() -> Iterator[tuple[str, str]]:
    for name in _FRONT:
        path = PACKAGE / name
        tree = parse(path)
        for word in _words_of(tree):
            yield word, name_of(path)


def _words_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "fallback_reason":
            yield from _fallback_table(node)
        elif isinstance(node, ast.Call) and called_name(node) in ("_settle", "count_fallback"):
            yield from _plain_words(node.args[:1])
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield from _plain_words(node.value.elts)
        elif isinstance(node, ast.Assign):
            yield from _assigned_reasons(node)


def _fallback_table(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            yield from _plain_words(node.keys)
        elif isinstance(node, ast.Return):
            yield from _plain_words([node.value])


def _assigned_reasons(node: ast.Assign) -> Iterator[str]:
    target = node.targets[0]
    if isinstance(target, ast.Name) and target.id == "reason":
        yield from _plain_words([node.value])
    elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        for name, value in zip(target.elts, node.value.elts, strict=False):
            if isinstance(name, ast.Name) and name.id == "reason":
                yield from _plain_words([value])


def _plain_words(nodes: list[ast.expr] | list[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        text = None if node is None else template(node)
        if text and _WORD.fullmatch(text):
            yield text


def _ask_words() -> Iterator[tuple[str, str]]:
    for path in module_paths("front"):
        for call in calls(parse(path), "AskFailed"):
            word = text_argument(call, "reason", 0)
            if word and HOLE not in word:
                yield word, name_of(path)


def _load_words() -> Iterator[tuple[str, str]]:
    """`word: …` among the texts that end a load, and the states of a lease that is not held."""
    for path in module_paths(*_LOADING):
        for word in _heads(path):
            yield word, name_of(path)
    for state in [*(state.value for state in LeaseState if state is not LeaseState.HELD), UNKNOWN.state]:
        yield f"lease_{state}", "vllm_ascend_pd/transfer/lease.py"


def _heads(path: Path) -> Iterator[str]:
    tree = parse(path)
    skipped = docstrings(tree) | {id(arg) for call in calls(tree, *_LOGGING) for arg in ast.walk(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
        if isinstance(node, ast.expr) and id(node) not in skipped:
            head = _HEAD.match(template(node) or "")
            if head and head[1] not in _NO_REASONS:
                yield head[1]
