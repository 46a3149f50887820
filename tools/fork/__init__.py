# SPDX-License-Identifier: Apache-2.0
"""Keep our delta of vLLM: edit files are data, this package applies them to a pinned release.

`python -m tools.fork --help` lists the verbs. An edit file imports its vocabulary from here; the import
is cheap on purpose (no libcst), so that mypy, ruff and a reader's shell can load an edit file alone.
"""

from tools.fork.ops import (
    AddField,
    AddImport,
    Anchor,
    Append,
    Assignment,
    Call,
    Field,
    InsertAfter,
    InsertBefore,
    InsertFirst,
    Op,
    ReplaceCallee,
    Return,
    Yield,
)

__all__ = [
    "AddField",
    "AddImport",
    "Anchor",
    "Append",
    "Assignment",
    "Call",
    "Field",
    "InsertAfter",
    "InsertBefore",
    "InsertFirst",
    "Op",
    "ReplaceCallee",
    "Return",
    "Yield",
]
