# SPDX-License-Identifier: Apache-2.0
"""`environment.md`: every variable that our code reads, from the syntax trees and the C++ sources."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from tools.reference.markdown import code, codes, page, table
from tools.reference.meanings import VARIABLES
from tools.reference.sources import ROOT, calls, constants, docstrings, module_paths, name_of, parse, text_argument
from vllm_ascend_pd.datadist.environment import COMPARED, TOLD
from vllm_ascend_pd.front.flags import OPTIONS, TOOL_VARIABLES

_NAME: Final = re.compile(r"(VLLM_PD|HCCL|ASCEND|GLOO|PD_COPY)_[A-Z0-9_]+")
_GETENV: Final = re.compile(r'getenv\("([A-Z0-9_]+)"\)')
_LOOKUPS: Final = ("get", "getenv", "pop")
_ENVIRONMENTS: Final = ("environ", "environment")
_ELSEWHERE: Final = ("bench",)  # a bench sets variables of its peers
_IGNORED: Final = frozenset({"PATH", "HOME"})


@functools.cache
def find_variables() -> dict[str, list[str]]:
    """Variable -> files that read it (or name it, where it is ours or CANN's); without the twins of flags."""
    found: dict[str, set[str]] = defaultdict(set)
    twins = {option.variable for option in OPTIONS}
    for path in module_paths():
        if path.relative_to(ROOT).parts[1] in _ELSEWHERE:
            continue
        for name in _names(parse(path)):
            if name not in twins | _IGNORED:
                found[name].add(name_of(path))
    for path in sorted((ROOT / "csrc_npu").rglob("*.cpp")):
        for name in _GETENV.findall(path.read_text()):
            found[name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(found[name]) for name in sorted(found)}


def _names(tree: ast.Module) -> Iterator[str]:
    known, skipped = constants(tree), docstrings(tree)
    for call in calls(tree, *_LOOKUPS):
        owner = ast.unparse(call.func)
        if owner.rpartition(".")[0].rpartition(".")[2] in _ENVIRONMENTS or owner.endswith("getenv"):
            first = call.args[0] if call.args else None
            name = known.get(first.id) if isinstance(first, ast.Name) else text_argument(call, "key", 0)
            if name and name.isupper():
                yield name
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in skipped else None
        if isinstance(text, str) and _NAME.fullmatch(text):
            yield text


def describe(name: str) -> str:
    """What it is for; of CANN's, what the handshake does with it."""
    text = VARIABLES.get(name, "")
    if name in COMPARED:
        text += f" CANN's; must be alike on both sides, else the handshake refuses. Not set counts as {COMPARED[name]}."
    elif name in TOLD:
        text += " Told in the handshake on NPU hosts, not compared."
    return text.strip() or "Of CANN, vLLM or the system; see the file."


def render() -> str:
    """The page."""
    twins = [(code(option.variable), code(option.flag)) for option in OPTIONS]
    rows = []
    for name, files in find_variables().items():
        read_by = codes(files[:3]) + (" and others" if len(files) > 3 else "")
        rows.append((code(name), describe(name), read_by))
    return page(
        "Environment variables",
        "`vllm serve` refuses a `VLLM_PD_…` variable that is not on this page, with or without `--pd-role`.",
        "## Twins of flags",
        "The flag wins; see [flags](flags.md). A list (`VLLM_PD_PREFILL`) is separated by commas or blanks, a "
        "switch is "
        "`1` or `0`.",
        table(("variable", "flag"), twins),
        "## Others",
        table(("variable", "what for", "read in"), rows),
        f"`vllm serve` knows these of them as ours: {codes(TOOL_VARIABLES)}.",
    )
