# SPDX-License-Identifier: Apache-2.0
"""Every call of a connector hook in vllm-ascend, and in the vLLM that it runs on, bound to our connector's signature.

A hook is what is called on `self.connector`, on `get_kv_transfer_group()` or on a variable that holds one of them.
vllm-ascend's own connectors call each other and are left out. Signatures are compared as Python would bind them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tools.ascend.modules import Function, Module, Modules, dotted, methods

OURS: Final = ("vllm/distributed/kv_transfer/kv_connector/v1/datadist/connector.py", "DataDistConnector")
BASES: Final = (
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA"),
)
# Where upstream's engine, which vllm-ascend inherits, speaks to a connector.
UPSTREAM_CALLERS: Final = (
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.worker.gpu.kv_connector",
)
_GETTERS: Final = ("get_kv_transfer_group", "get_kv_connector")
_HOLDERS: Final = ("self.connector", "self.kv_connector")
_OWN_CONNECTORS: Final = (
    "vllm_ascend.distributed.kv_transfer",
    "vllm_ascend.kv_offload",
    "vllm_ascend.simple_kv_offload",
)


@dataclass(frozen=True)
class HookCall:
    """One call (`arguments` is None where it is only an attribute that is read)."""

    where: str
    name: str
    arguments: tuple[int, tuple[str, ...]] | None  # positional count, keywords
    spreads: bool = False  # passes *args or **kwargs on


@lru_cache(maxsize=2)
def find_hook_calls(modules: Modules) -> tuple[HookCall, ...]:
    """All calls, in a stable order."""
    names = [n for n in modules.names("vllm_ascend") if not n.startswith(_OWN_CONNECTORS)]
    names += [n for n in UPSTREAM_CALLERS if n in modules]
    found = {call for name in names for call in _calls(modules, modules.get(name))}
    return tuple(sorted(found, key=lambda c: (c.name, c.where, str(c.arguments))))


def _calls(modules: Modules, module: Module) -> Iterator[HookCall]:
    path = modules.path(module.name)
    called = {id(call.func) for call in module.of(ast.Call)}
    scopes: list[tuple[list[ast.AST], set[str]]] = [(module.nodes, set())]
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
        for function in module.of(kind):
            nodes = list(ast.walk(function))
            if held := _held(nodes):
                scopes.append((nodes, held))
    for nodes, held in scopes:
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if _is_connector(node.func.value, held):
                    yield _call(f"{path}:{node.lineno}", node.func.attr, node)
            elif isinstance(node, ast.Attribute) and id(node) not in called and _is_connector(node.value, held):
                yield HookCall(f"{path}:{node.lineno}", node.attr, None)


def _held(nodes: list[ast.AST]) -> set[str]:
    """The local names that a function gives to the connector; elsewhere the same name is another thing."""
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_connector(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _call(where: str, name: str, call: ast.Call) -> HookCall:
    positional = [a for a in call.args if not isinstance(a, ast.Starred)]
    keywords = tuple(sorted(k.arg for k in call.keywords if k.arg is not None))
    spreads = len(positional) != len(call.args) or len(keywords) != len(call.keywords)
    return HookCall(where, name, (len(positional), keywords), spreads)


def _is_connector(node: ast.expr, held: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return (dotted(node.func) or "").rpartition(".")[2] in _GETTERS
    name = dotted(node)
    return name in _HOLDERS or name in held


@dataclass(frozen=True)
class Hooks:
    """The methods that our connector answers with: its own, else its bases'. `own` names those that it defines."""

    functions: dict[str, Function]
    own: frozenset[str]
    attributes: frozenset[str]


def load_hooks(modules: Modules, source: bytes) -> Hooks:
    """Of our connector's source, over its bases in the lane's vLLM."""
    tree = ast.parse(source)
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == OURS[1])
    functions: dict[str, Function] = {}
    attributes: set[str] = set()
    for place in reversed(BASES):
        base = modules.find_class(*place)
        assert base is not None, f"{place[0]} does not define {place[1]}"
        functions |= methods(base)
        attributes |= _attributes(base)
    own = methods(cls)
    return Hooks(functions | own, frozenset(own), frozenset(attributes | _attributes(cls)))


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Names that the class sets on itself or on `self`."""
    found = {t.id for n in cls.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    found |= {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            found.add(node.attr)
    return found


def faults(calls: Sequence[HookCall], hooks: Hooks) -> list[str]:
    """What would fail at run time, one sentence each."""
    found = []
    for call in calls:
        function = hooks.functions.get(call.name)
        if function is None:
            if call.arguments is not None or call.name not in hooks.attributes:
                found.append(f"{call.where} uses {call.name}, which our connector and its base do not have")
        elif call.arguments is not None and (problem := binding_fault(function, *call.arguments, call.spreads)):
            found.append(f"{call.where} calls {call.name}: {problem}")
    return found


def binding_fault(function: Function, positional: int, keywords: tuple[str, ...], spreads: bool = False) -> str:
    """Why these arguments do not fit the function; empty when they do."""
    spec = function.args
    static = any(dotted(d) == "staticmethod" for d in function.decorator_list)
    names = [a.arg for a in [*spec.posonlyargs, *spec.args]][0 if static else 1 :]
    required = names[: len(names) - len(spec.defaults)] if spec.defaults else names
    only = [a.arg for a in spec.kwonlyargs]
    needed = [a for a, default in zip(only, spec.kw_defaults, strict=True) if default is None]
    if positional > len(names) and spec.vararg is None:
        return f"takes {len(names)} arguments, is given {positional}"
    taken = names[:positional]
    if (unknown := [k for k in keywords if k not in names and k not in only]) and spec.kwarg is None:
        return f"does not know {', '.join(unknown)}"
    if double := [k for k in keywords if k in taken]:
        return f"gets {', '.join(double)} twice"
    given = {*taken, *keywords}
    missing = [n for n in [*required, *needed] if n not in given]
    return f"is not given {', '.join(missing)}" if missing and not spreads else ""


def narrowed(hooks: Hooks, modules: Modules) -> list[str]:
    """Methods of ours that do not take what their base's take: a caller written for the base would fail."""
    found = []
    for place in BASES:
        base = modules.find_class(*place)
        assert base is not None
        for name, function in methods(base).items():
            if name not in hooks.own or name == "__init__":
                continue
            names = [a.arg for a in [*function.args.posonlyargs, *function.args.args]][1:]
            only = [a.arg for a in function.args.kwonlyargs]
            for arguments in ((len(names), tuple(only)), (0, tuple([*names, *only]))):
                if problem := binding_fault(hooks.functions[name], *arguments):
                    found.append(f"{name}: {problem}")
    return found
