# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of an edit file: anchors and operations as frozen data, no behaviour.

An anchor names a statement by what it is, never by its text or position. `scope` is the dotted path of a
class or function inside the module (`EngineArgs.create_engine_config`); an anchor is looked for at any
depth inside it, also within with, try and if. Every operation must match exactly once. `apply.py` is next
in the reading order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A statement that is a call, or assigns, awaits, returns or yields one, of a callee ending in `callee`.

    `callee` matches whole names from the right: `zeros` and `torch.zeros` both match `torch.zeros(...)`.
    With `argument`, the call must also carry that string literal.
    """

    callee: str
    argument: str | None = None


@dataclass(frozen=True)
class Assignment:
    """A statement that assigns to `target`: a name, an attribute `self.x` or an item `extra["pd"]`.

    Annotated, augmented, chained and unpacking assignments count too. With `callee`, the value must be a
    call (awaited or not) whose callee ends in it.
    """

    target: str
    callee: str | None = None


@dataclass(frozen=True)
class Return:
    """A `return` of the scope itself; those of functions nested in it do not count."""


@dataclass(frozen=True)
class Yield:
    """A statement that yields, or assigns what a yield gives; nested functions do not count."""


@dataclass(frozen=True)
class Field:
    """The field `name` of a class: an assignment, annotated or not, in the class body."""

    name: str


Anchor = Call | Assignment | Return | Yield | Field


@dataclass(frozen=True)
class Op:
    """One operation; `code` is our payload, at most three lines."""

    code: str


@dataclass(frozen=True)
class AddImport(Op):
    """Add an import behind the module's first block of imports."""


@dataclass(frozen=True)
class Append(Op):
    """Add a statement at the end of the module."""


@dataclass(frozen=True, kw_only=True)
class AddField(Op):
    """Add a field to class `cls`, behind the field `after` and its docstring."""

    cls: str
    after: str

    @property
    def scope(self) -> str:
        """The class, under the name that the other operations use."""
        return self.cls


@dataclass(frozen=True, kw_only=True)
class InsertFirst(Op):
    """Insert as first statement of a function or class body, behind its docstring."""

    scope: str


@dataclass(frozen=True, kw_only=True)
class InsertBefore(Op):
    """Insert in front of the anchor, in the same block; a comment above the anchor stays with the anchor."""

    scope: str
    anchor: Anchor


@dataclass(frozen=True, kw_only=True)
class InsertAfter(Op):
    """Insert behind the anchor, in the same block."""

    scope: str
    anchor: Anchor


@dataclass(frozen=True, kw_only=True)
class ReplaceCallee(Op):
    """Put the expression `code` in the place of the callee that `anchor` names; the arguments stay.

    The call may stand anywhere inside a simple statement of the scope, also within another expression.
    """

    scope: str
    anchor: Call


def scope_of(op: Op) -> str | None:
    """The dotted class or function path that `op` needs, or None where it works on the module."""
    if isinstance(op, AddField | InsertFirst | InsertBefore | InsertAfter | ReplaceCallee):
        return op.scope
    return None
