# SPDX-License-Identifier: Apache-2.0
"""Names across two packages without importing them: what an alias means, where a class is defined, what it inherits.

Pure: source bytes in. Flow is not followed: an alias is what any import or assignment of the module makes it, at any
depth. That finds more than is true rather than less, which is the right side for a check.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
_MAX_HOPS = 20
_LOOKUPS = ("sys.modules.get", "import_module", "importlib.import_module")


@dataclass
class Module:
    """One parsed module: `aliases` by name the dotted name that it stands for, `defined` top-level definitions."""

    name: str
    nodes: list[ast.AST]  # all of them, outermost first
    aliases: dict[str, str] = field(default_factory=dict)
    defined: dict[str, ast.ClassDef | Function] = field(default_factory=dict)
    nested: dict[str, ast.ClassDef | Function] = field(default_factory=dict)  # definitions at any depth

    def of(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of one kind."""
        return (node for node in self.nodes if isinstance(node, kind))


class Modules:
    """The modules of both packages; parsed when first asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = {_module_name(path): (path, data) for path, data in files.items()}
        self._packages = {_module_name(path) for path in files if path.endswith("/__init__.py")}
        self.get = lru_cache(maxsize=None)(self._parse)
        self.locate = lru_cache(maxsize=None)(self._locate)

    def names(self, prefix: str) -> list[str]:
        """All module names of a package, sorted."""
        return sorted(name for name in self._files if name == prefix or name.startswith(f"{prefix}."))

    def path(self, module: str) -> str:
        """The file of a module."""
        return self._files[module][0]

    def source(self, module: str) -> bytes:
        """The text of a module."""
        return self._files[module][1]

    def __contains__(self, module: str) -> bool:
        return module in self._files

    def _parse(self, name: str) -> Module:
        tree = ast.parse(self._files[name][1])
        module = Module(name, list(ast.walk(tree)))
        package = name if name in self._packages else name.rpartition(".")[0]
        for node in module.nodes:
            if isinstance(node, ast.ClassDef | Function):
                module.nested.setdefault(node.name, node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    module.aliases[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node, package)
                for alias in node.names:
                    module.aliases[alias.asname or alias.name] = f"{source}.{alias.name}"
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                meant = _module_lookup(node.value) or dotted(node.value) or ""
                if "." in meant:
                    module.aliases.setdefault(node.targets[0].id, meant)
        for node in _definitions(tree):
            module.defined[node.name] = node
        return module

    def meaning(self, module: Module, name: str) -> str:
        """The absolute dotted name of `name` as the module uses it; unchanged where its first part is unknown."""
        for _ in range(_MAX_HOPS):
            first, dot, rest = name.partition(".")
            if first in module.defined:
                return f"{module.name}.{name}"
            meant = module.aliases.get(first)
            if meant is None or meant.partition(".")[0] == first:
                return name if meant is None else f"{meant}{dot}{rest}"
            name = f"{meant}{dot}{rest}"
        return name

    def _locate(self, name: str) -> tuple[str, str] | None:
        """Module and qualified name of what an absolute dotted name means, through re-exports; None if unknown."""
        for _ in range(_MAX_HOPS):
            module = name
            while module and module not in self:
                module = module.rpartition(".")[0]
            if not module or module == name:
                return (module, "") if module else None
            rest = name[len(module) + 1 :]
            first = rest.partition(".")[0]
            parsed = self.get(module)
            if first in parsed.defined or first not in parsed.aliases:
                return module, rest
            further = parsed.aliases[first] + rest[len(first) :]
            if further == name:
                return module, rest
            name = further
        return None

    def bases(self, module: str, cls: ast.ClassDef) -> list[tuple[str, str]]:
        """Where the direct bases of a class are defined; those that neither package has are left out."""
        parsed = self.get(module)
        names = [self.meaning(parsed, name) for base in cls.bases if (name := dotted(_unsubscripted(base)))]
        return [place for name in names if (place := self.locate(name)) and place[1]]

    def find_class(self, module: str, name: str) -> ast.ClassDef | None:
        """A top-level class."""
        node = self.get(module).defined.get(name) if module in self else None
        return node if isinstance(node, ast.ClassDef) else None

    def ancestors(self, module: str, cls: ast.ClassDef) -> list[tuple[str, str]]:
        """All bases of a class, nearest first, each once."""
        found: list[tuple[str, str]] = []
        queue = self.bases(module, cls)
        while queue:
            place = queue.pop(0)
            if place in found:
                continue
            found.append(place)
            if (base := self.find_class(*place)) is not None:
                queue += self.bases(place[0], base)
        return found


def methods(cls: ast.ClassDef) -> dict[str, Function]:
    """The functions that a class defines, by name; the last of several (overloads) counts."""
    return {n.name: n for n in _definitions(cls) if isinstance(n, Function)}


def dotted(node: ast.AST | None) -> str | None:
    """`a.b.c` of a name or attribute chain; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | Function]:
    """Classes and functions of a module or class body, also below if, try and with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child)


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parent = ".".join(parts[: len(parts) - node.level + 1])
    return f"{parent}.{node.module}" if node.module else parent


def _module_lookup(node: ast.expr) -> str | None:
    """The module that `sys.modules.get("x")`, `sys.modules["x"]` or `import_module("x")` gives."""
    argument: ast.expr | None = None
    if isinstance(node, ast.Call) and dotted(node.func) in _LOOKUPS and node.args:
        argument = node.args[0]
    elif isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
        argument = node.slice
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def _unsubscripted(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node
