# SPDX-License-Identifier: Apache-2.0
"""What an upstream release changes for our code beyond the anchors of edits: the connector contract, and imports.

Reads syntax trees only. Edits cannot see these: all may apply while a hook has moved or a name is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.ascend.hooks import BASES, OURS, faults, find_hook_calls, load_hooks, narrowed
from tools.ascend.modules import Function, Modules, methods
from tools.fork.delta import REPO, new_modules, package_files
from tools.fork.source import UpstreamTree


def modules_of(tree: UpstreamTree) -> Modules:
    """The Python modules of a release."""
    return Modules({name: data for name in tree.names() if name.endswith(".py") and (data := tree.read(name))})


def hook_faults(modules: Modules, repo: Path = REPO) -> list[str]:
    """Where this release's engine calls a connector in a way that ours does not answer."""
    hooks = load_hooks(modules, (repo / OURS[0]).read_bytes())
    return faults(find_hook_calls(modules), hooks) + narrowed(hooks, modules)


def connector_changes(old: Modules, new: Modules) -> list[str]:
    """Methods of the connector's base classes that came, went, or take something else now."""
    lines = []
    for module, name in BASES:
        before, after = (_methods(modules, module, name) for modules in (old, new))
        lines += [f"{name}.{m}({_arguments(after[m])}) is new" for m in sorted(after.keys() - before.keys())]
        lines += [f"{name}.{m} is gone" for m in sorted(before.keys() - after.keys())]
        for method in sorted(before.keys() & after.keys()):
            was, now = _arguments(before[method]), _arguments(after[method])
            if was != now:
                lines.append(f"{name}.{method}({was}) is now ({now})")
    return lines


def _methods(modules: Modules, module: str, name: str) -> dict[str, Function]:
    cls = modules.find_class(module, name)
    return methods(cls) if cls is not None else {}


def _arguments(function: Function) -> str:
    spec = function.args
    names = [a.arg for a in [*spec.posonlyargs, *spec.args]]
    names += [f"*{spec.vararg.arg}"] if spec.vararg else ["*"] if spec.kwonlyargs else []
    names += [a.arg for a in spec.kwonlyargs]
    return ", ".join([*names, *([f"**{spec.kwarg.arg}"] if spec.kwarg else [])])


def lost_imports(old: Modules, new: Modules, repo: Path = REPO) -> list[str]:
    """Names of vLLM that our code imports, which `old` has and `new` has not, with the files that import them."""
    users: dict[str, list[str]] = {}
    for path, data in {**new_modules(repo), **package_files(repo)}.items():
        if path.endswith(".py"):
            for name in _imported(ast.parse(data)):
                users.setdefault(name, []).append(path)
    return [
        f"{name} is gone, and {', '.join(sorted(set(paths)))} imports it"
        for name, paths in sorted(users.items())
        if _has(old, name) and not _has(new, name)
    ]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("vllm."))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _has(modules: Modules, name: str) -> bool:
    """Whether a module, or a name in one, exists; names that are set in ways that are not followed count as there."""
    if name in modules:
        return True
    module, _, attribute = name.rpartition(".")
    if module not in modules:
        return False
    parsed = modules.get(module)
    if attribute in parsed.defined or attribute in parsed.aliases:
        return True
    return attribute.encode() in modules.source(module)
