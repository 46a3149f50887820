# SPDX-License-Identifier: Apache-2.0
"""What of vLLM vllm-ascend replaces: methods of subclasses, and attributes that it assigns on vLLM's objects.

Each is an `Override`: where it stands, which place of vLLM it takes, and whether it goes on into the original. An
assignment whose object cannot be told (`cls.update_from_output = …`) takes that attribute of every class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tools.ascend.modules import Function, Module, Modules, dotted, methods

ANY = "*"
_OWN_OBJECTS = ("self", "instance")


@dataclass(frozen=True)
class Override:
    """One replacement. `place` is (module, qualified name) in vLLM; module `*` where only the attribute is known."""

    where: str  # vllm_ascend/core/recompute_scheduler.py:RecomputeScheduler.update_from_output
    place: tuple[str, str]
    kind: str  # "subclass" or "assigns"
    continues: bool  # calls what it replaces, so that code inside the original still runs

    def covers(self, module: str, scope: str) -> bool:
        """Whether code inside `scope` of a vLLM module is replaced by this."""
        place_module, name = self.place
        if place_module == ANY:
            return scope.rpartition(".")[2] == name
        return place_module == module and (name in ("", scope) or scope.startswith(f"{name}."))


@lru_cache(maxsize=2)
def find_overrides(modules: Modules) -> tuple[Override, ...]:
    """All of them, in a stable order."""
    found: set[Override] = set()
    for name in modules.names("vllm_ascend"):
        module = modules.get(name)
        found |= set(_subclass_overrides(modules, module))
        found |= set(_assignments(modules, module))
    return tuple(sorted(found, key=lambda o: (o.where, o.place)))


def _subclass_overrides(modules: Modules, module: Module) -> Iterator[Override]:
    for node in module.of(ast.ClassDef):
        upstream = [place for place in modules.ancestors(module.name, node) if place[0].startswith("vllm.")]
        for name, function in methods(node).items():
            for base_module, base in upstream:
                if not _defines(modules, base_module, base, name):
                    continue
                where = f"{modules.path(module.name)}:{node.name}.{name}"
                yield Override(where, (base_module, f"{base}.{name}"), "subclass", _calls_super(function, name, base))


def _defines(modules: Modules, module: str, base: str, method: str) -> bool:
    """Whether a base has that method itself; a base that cannot be looked into is taken to have it."""
    cls = modules.find_class(module, base)
    return cls is None or method in methods(cls)


def _calls_super(function: Function, name: str, base: str) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            value = node.func.value
            if isinstance(value, ast.Call) and dotted(value.func) == "super":
                return True
            if dotted(value) == base:
                return True
    return False


def _assignments(modules: Modules, module: Module) -> Iterator[Override]:
    for node in module.nodes:
        for target, attribute, value in _targets(node):
            first = target.partition(".")[0]
            if first in _OWN_OBJECTS:
                continue
            where = f"{modules.path(module.name)}:{target}.{attribute}"
            meant = modules.meaning(module, target)
            if meant == "vllm" or meant.startswith("vllm."):
                continues = _continues(modules, module, f"{target}.{attribute}", value)
                for place in _places(modules, meant, attribute):
                    yield Override(where, place, "assigns", continues)
            elif first == meant.partition(".")[0] and first not in module.aliases and _is_callable(module, value):
                continues = _continues(modules, module, f"{target}.{attribute}", value)
                yield Override(where, (ANY, attribute), "assigns", continues)


def _places(modules: Modules, target: str, attribute: str) -> set[tuple[str, str]]:
    """The name in the object that is assigned to, and the definition that the name led to before."""
    defined = modules.locate(f"{target}.{attribute}")
    if defined is not None and not defined[1]:  # a whole module
        return {defined}
    holder = modules.locate(target)
    here = {(holder[0], f"{holder[1]}.{attribute}".lstrip("."))} if holder is not None else set()
    return here | ({defined} if defined is not None else set())


def _targets(node: ast.AST) -> Iterator[tuple[str, str, ast.expr]]:
    """(object, attribute, value) of `a.b.c = v`, of `setattr(a.b, "c", v)`, and of `sys.modules["a.b"] = v`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and (name := dotted(target.value)):
                yield name, target.attr, node.value
            if isinstance(target, ast.Subscript) and dotted(target.value) == "sys.modules":
                key = target.slice
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and "." in key.value:
                    parent, _, last = key.value.rpartition(".")
                    yield parent, last, node.value
    elif isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) == 3:
        name, key = dotted(node.args[0]), node.args[1]
        if name and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield name, key.value, node.args[2]


def _is_callable(module: Module, value: ast.expr) -> bool:
    """Whether a value of unknown effect may be a function: a name that the module defines as one, or a lambda."""
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in module.nested)


def _continues(modules: Modules, module: Module, target: str, value: ast.expr) -> bool:
    """Whether the assigned function uses what stood there before, or the assigned class derives from it."""
    if not isinstance(value, ast.Name):
        return False
    saved = {
        name.id
        for node in module.of(ast.Assign)
        if dotted(node.value) == target
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    taken = module.nested.get(value.id)
    if isinstance(taken, ast.ClassDef):
        return modules.locate(modules.meaning(module, target)) in modules.ancestors(module.name, taken)
    return taken is not None and any(isinstance(n, ast.Name) and n.id in saved for n in ast.walk(taken))
