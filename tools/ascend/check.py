# SPDX-License-Identifier: Apache-2.0
"""Intersects our edits with what vllm-ascend replaces, and binds every connector hook; says what is wrong."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.ascend.hooks import OURS, faults, find_hook_calls, load_hooks, narrowed
from tools.ascend.modules import Modules, methods
from tools.ascend.overrides import Override, find_overrides
from tools.ascend.reviewed import REVIEWED, Refused, Verdict, Wraps
from tools.fork.delta import REPO, EditFile, load_edits
from tools.fork.lanes import get_lane
from tools.fork.ops import scope_of
from tools.fork.patch import defined_scopes
from vllm_ascend_pd.ascend.together import RULES

Key = tuple[str, str, str]
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")  # wait_for_save is called once a step, outside the graph


@dataclass(frozen=True)
class Crossing:
    """One scope of one edit, replaced by one override."""

    edit: str
    scope: str
    override: Override

    @property
    def key(self) -> Key:
        """How `reviewed.py` names it."""
        return self.edit, self.scope, self.override.where


def edited_scopes(edits: Sequence[EditFile], modules: Modules, release: str) -> list[tuple[str, str, str]]:
    """(edit file, module, scope) of every operation on that release; the scope is empty for a whole module."""
    found = set()
    for edit in edits:
        if edit.applies_to(release):
            scopes = {scope_of(op) or "" for op in edit.ops}
            for module in _edited_modules(edit, modules, scopes - {""}):
                found |= {(edit.path, module, scope) for scope in scopes}
    return sorted(found)


def _edited_modules(edit: EditFile, modules: Modules, scopes: set[str]) -> list[str]:
    """The candidates of an edit that exist and define its scopes."""
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in edit.upstream]
    return [name for name in names if name in modules and scopes <= defined_scopes(modules.source(name))]


def find_crossings(edits: Sequence[EditFile], modules: Modules, overrides: Sequence[Override]) -> list[Crossing]:
    """Where both meet."""
    release = get_lane("ascend").release
    return [
        Crossing(edit, scope, override)
        for edit, module, scope in edited_scopes(edits, modules, release)
        for override in overrides
        if override.covers(module, scope)
    ]


def review_faults(crossings: Sequence[Crossing], reviewed: Mapping[Key, Verdict] = REVIEWED) -> list[str]:
    """What the list of reviewed crossings gets wrong, one sentence each."""
    found = []
    rules = {rule.name for rule in RULES}
    for crossing in crossings:
        verdict = reviewed.get(crossing.key)
        at = f"{crossing.edit}: {crossing.scope or 'the module'} is replaced by {crossing.override.where}"
        if verdict is None:
            found.append(f"{at}: nobody has looked at it: tools/ascend/reviewed.py")
        elif isinstance(verdict, Wraps) and not crossing.override.continues:
            found.append(f"{at}: reviewed as calling the original, but it does not")
        elif isinstance(verdict, Refused) and verdict.rule not in rules:
            found.append(f"{at}: reviewed as refused by rule {verdict.rule!r}, which together.py does not have")
    seen = {crossing.key for crossing in crossings}
    found += [
        f"tools/ascend/reviewed.py: {' | '.join(key)}: does not occur any more" for key in reviewed if key not in seen
    ]
    return found


def layer_hook_faults(source: bytes) -> list[str]:
    """Our hooks between layers must do nothing: replayed graphs run no Python, so they would be left out silently."""
    tree = ast.parse(source)
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == OURS[1])
    found = []
    ours = methods(cls)
    for name in LAYER_HOOKS:
        body = ours[name].body if name in ours else []
        if not (len(body) == 1 and isinstance(body[0], ast.Return | ast.Pass) and not getattr(body[0], "value", None)):
            found.append(f"{OURS[0]}: {name} does something; a FULL graph replays without it")
    if "requires_piecewise_for_cudagraph" in ours:
        found.append(f"{OURS[0]}: requires_piecewise_for_cudagraph is overridden; no hook needs it")
    return found


def check_all(modules: Modules) -> list[str]:
    """Every fault of our delta beside this vllm-ascend."""
    source = (REPO / OURS[0]).read_bytes()
    hooks = load_hooks(modules, source)
    crossings = find_crossings(load_edits(), modules, find_overrides(modules))
    found = faults(find_hook_calls(modules), hooks) + [f"{OURS[0]}: {fault}" for fault in narrowed(hooks, modules)]
    return found + review_faults(crossings) + layer_hook_faults(source)
