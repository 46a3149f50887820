# SPDX-License-Identifier: Apache-2.0
"""`errors.md`: HTTP errors, refusals at start, codes between instances, status codes of the data plane, exit codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from tools.reference.markdown import code, first_paragraph, page, table
from tools.reference.sources import (
    HOLE,
    argument,
    calls,
    docstrings,
    module_paths,
    name_of,
    parse,
    text_argument,
)
from vllm_ascend_pd.ascend.together import RULES
from vllm_ascend_pd.datadist.outcomes import LINK, PULL, Action, Outcome, judge
from vllm_ascend_pd.datadist.status import LLMStatusCode

_DEFAULT_CODE: Final = "pd_prefill_refused"
_ACTIONS: Final = {
    Action.DONE: "goes on",
    Action.WAIT: "tries again a little later, until the deadline",
    Action.RELINK: "takes the link down, makes it anew, tries once more",
    Action.FAIL: "fails",
}
# Where a wrong command line or configuration is found out before a server serves.
_START: Final = ("config.py", "secret.py", "front", "engine", "control", "ascend", "doctor/start.py")


def find_http_errors() -> list[tuple[str, str, str, str]]:
    """(status, code, what, file) of every typed error that a client or another instance can be answered."""
    found = []
    for path in module_paths():
        tree = parse(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found += [(*row, name_of(path)) for row in _class_error(node)]
        for call in calls(tree, "PrefillRefused"):
            status = argument(call, "http_status", 0)
            if isinstance(status, ast.Constant):
                words = text_argument(call, "message", 1) or "…"
                name = text_argument(call, "code", 2) or _DEFAULT_CODE
                found.append((str(status.value), name, words.replace(HOLE, "…"), name_of(path)))
    return sorted(set(found))


def _class_error(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    values = {
        item.targets[0].id: item.value.value
        for item in node.body
        if isinstance(item, ast.Assign)
        and isinstance(item.targets[0], ast.Name)
        and isinstance(item.value, ast.Constant)
    }
    if "http_status" in values and "code" in values:
        yield str(values["http_status"]), str(values["code"]), first_paragraph(ast.get_docstring(node))


def find_start_refusals() -> list[tuple[str, str]]:
    """(words, file) of the errors that stop a start; `…` stands for what varies."""
    found = []
    for path in module_paths(*_START):
        if not path.exists():
            continue
        tree = parse(path)
        skipped = docstrings(tree)
        for call in calls(tree, "PDConfigError"):
            words = None if not call.args or id(call.args[0]) in skipped else _words(call.args[0])
            if words:
                found.append((re.sub("…+", "…", words), name_of(path)))
    return list(dict.fromkeys(found))


def _words(node: ast.expr) -> str:
    """The text of an expression of strings; `…` for everything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) for part in node.values)
    return "…"


def find_wire_codes() -> list[tuple[str, str, str]]:
    """(code, words, file) of refusals between engine cores."""
    found = []
    for path in module_paths():
        for call in calls(parse(path), "Refused"):
            name, message = text_argument(call, "code"), argument(call, "message")
            if name:
                found.append((name, _words(message) if message is not None else "", name_of(path)))
    return sorted(set(found))


def show_status(value: int) -> str:
    """Hexadecimal as CANN writes its own codes; decimal for those of the runtime."""
    return f"0x{value:X}" if value > 0xFFFFFF or value == 0 else str(value)


def follow(outcome: Outcome) -> str:
    """What a rank does by itself."""
    drops = outcome.spoils and outcome.action is Action.FAIL
    return _ACTIONS[outcome.action] + (", and takes the link down" if drops else "")


def render() -> str:
    """The page."""
    http = [(status, code(name), text, code(file)) for status, name, text, file in find_http_errors()]
    start = [(text.replace("\n", " "), code(file)) for text, file in find_start_refusals() if text != "…"]
    wire = [(code(name), text, code(file)) for name, text, file in find_wire_codes()]
    llm = [
        (code(item.name), show_status(item.value), follow(judge(PULL, item)), follow(judge(LINK, item)))
        for item in LLMStatusCode
    ]
    return page(
        "Errors",
        "## HTTP",
        'In vLLM\'s own shape: `{"error": {"message": …, "type": CODE, "param": null, "code": STATUS}}`. Once a stream '
        "has begun, the same object comes as an SSE event. `pd_kv_unavailable` and `pd_deadline` are what a client can "
        "meet; it may send the request again. The rest is between instances.",
        table(("status", "code", "when", "raised in"), http),
        "## Refused at start",
        "Printed after `vllm serve: error:` with exit status 2 when the command line shows it, or as the last error in "
        "the log, with exit status 1, when it takes the loaded configuration or a peer. `…` stands for what varies.",
        table(("message", "raised in"), start),
        "With vllm-ascend these do not go together with `--pd-role` and are refused by name and value:",
        table(("what", "why"), [(rule.name, rule.why) for rule in RULES]),
        "A decode instance also ends with status 1 when a prefill instance answers and does not match "
        "([handshake](handshake.md)), or when none answers within `--pd-start-timeout`.",
        "## Between engine cores",
        "`code` of a refusal on the control plane. `handshake` names a [field](handshake.md) and both values.",
        table(("code", "message", "in"), wire),
        "## Status codes of `llm_datadist`",
        "As they appear in log lines after `link:` and `pull:`, and what a rank does then by itself, within the "
        "request's deadline. A code that is not here counts as `LLM_FAILED`. What to do about one that stays is in "
        "[troubleshooting](../troubleshooting.md#status-codes-of-the-data-plane).",
        table(("name", "value", "a pull", "making a link"), llm),
        "## Exit status",
        table(
            ("command", "status"),
            [
                ("`vllm serve`", "2: wrong command line; 1: cannot start (the last error in the log); else vLLM's own"),
                (
                    "`vllm pd up`, `vllm pd status`",
                    "0: done, also after Ctrl-C; 1: failed, with a sentence; 2: wrong command line",
                ),
                (
                    "`vllm pd drain`",
                    "0: nothing is left, or nobody waited; 1: failed, or something is left; 2: the same",
                ),
                ("`vllm pd bench`", "the same, and 130 after Ctrl-C"),
            ],
        ),
    )
