# SPDX-License-Identifier: Apache-2.0
"""The delta that this repository holds: edit files and new modules below `vllm/`, and `vllm_ascend_pd`.

An edit file is Python that only builds data; it is run to read its `UPSTREAM`, `EDITS` and `LANES`.
"""

from __future__ import annotations

import ast
import runpy
from dataclasses import dataclass
from pathlib import Path

from tools.fork.errors import EditInvalid
from tools.fork.ops import Op
from tools.fork.payload import check_op

REPO = Path(__file__).resolve().parents[2]
EDIT_SUFFIX = ".edit.py"
REASONS = ("Why here", "What it does", "Kind", "Forwarded", "Drop when")
PACKAGE = "vllm_ascend_pd"
PACKAGE_SUFFIXES = frozenset({".py", ".pyi", ".typed", ".json", ".html"})
# csrc_npu/npu and what it includes and links; its subfolder `triton` imitates hardware for the tests.
NPU_SOURCES = (("include/pd", "*.h"), ("src", "*.h"), ("src", "*.cpp"), ("npu", "*.h"), ("npu", "*.cpp"))
NPU_PLACE = f"{PACKAGE}/npu/csrc"


@dataclass(frozen=True)
class EditFile:
    """One `*.edit.py`: its path in the repo, candidate upstream files, operations, and its reasons."""

    path: str
    upstream: tuple[str, ...]
    ops: tuple[Op, ...]
    lanes: tuple[str, ...] | None
    summary: str
    doc: str

    def applies_to(self, release: str) -> bool:
        """Whether this edit is meant for that upstream release."""
        return self.lanes is None or release in self.lanes

    def reason(self, field: str) -> str:
        """The text of one docstring field of `REASONS`, in one line; empty where it is missing."""
        return _fields(self.doc).get(field, "")


def load_edits(repo: Path = REPO) -> list[EditFile]:
    """All edit files in path order.

    Raises:
        EditInvalid: a file does not define what an edit file must, or an operation breaks the vocabulary.
    """
    return [load_edit(p, repo) for p in sorted((repo / "vllm").rglob(f"*{EDIT_SUFFIX}"))]


def load_edit(path: Path, repo: Path) -> EditFile:
    """One edit file.

    Raises:
        EditInvalid: see `load_edits`.
    """
    name = path.relative_to(repo).as_posix()
    doc = _docstring(path, name)
    try:
        values = runpy.run_path(str(path))
    except Exception as error:
        raise EditInvalid(f"{name}: cannot be loaded: {type(error).__name__}: {error}") from error
    upstream, ops, lanes = values.get("UPSTREAM"), values.get("EDITS"), values.get("LANES")
    if not _are(upstream, str) or not all(u.startswith("vllm/") and u.endswith(".py") for u in upstream or ()):
        raise EditInvalid(f"{name}: UPSTREAM must be a tuple of paths 'vllm/….py', is {upstream!r}")
    if not _are(ops, Op):
        raise EditInvalid(f"{name}: EDITS must be a non-empty tuple of operations, is {ops!r}")
    if lanes is not None and not _are(lanes, str):
        raise EditInvalid(f"{name}: LANES must be a tuple of upstream releases, is {lanes!r}")
    assert isinstance(ops, tuple)
    assert isinstance(upstream, tuple)
    for op in ops:
        check_op(op, name)
    missing = [field for field in REASONS if field not in _fields(doc)]
    if missing:
        raise EditInvalid(f"{name}: its docstring does not say: {', '.join(missing)}")
    return EditFile(name, upstream, ops, lanes, doc.splitlines()[0], doc)


def _docstring(path: Path, name: str) -> str:
    try:
        doc = ast.get_docstring(ast.parse(path.read_bytes()))
    except SyntaxError as error:
        raise EditInvalid(f"{name}: line {error.lineno}: {error.msg}") from None
    if not doc:
        raise EditInvalid(f"{name}: has no docstring; it must say: {', '.join(REASONS)}")
    return doc


def _are(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and bool(values) and all(isinstance(v, kind) for v in values)


def _fields(doc: str) -> dict[str, str]:
    """`Name   text` at the left margin, continued on indented lines; two fields may share a line."""
    found: dict[str, str] = {}
    current = ""
    for line in doc.splitlines()[1:]:
        if line[:1].isspace() or not line.strip():
            if current and line.strip():
                found[current] = f"{found[current]} {line.strip()}".strip()
            continue
        current = ""
        for field in REASONS:
            at = line.find(field)
            if at == 0 or (at > 0 and line[:at].endswith("  ") and current):
                if current:
                    found[current] = found[current].partition(field)[0].strip(" :")
                found[field] = line[at + len(field) :].strip(" :")
                current = field
    return found


def new_modules(repo: Path = REPO) -> dict[str, bytes]:
    """The modules that `vllm/` adds, by the path which they get in the installed package."""
    found = {}
    for path in sorted((repo / "vllm").rglob("*")):
        name = path.relative_to(repo).as_posix()
        if path.suffix in (".py", ".pyi") and not name.endswith(EDIT_SUFFIX) and "__pycache__" not in path.parts:
            found[name] = path.read_bytes()
    return found


def package_files(repo: Path = REPO) -> dict[str, bytes]:
    """The files of `vllm_ascend_pd` that ship; not its libraries, which the wheel gets for its own machine."""
    found = {}
    for path in sorted((repo / PACKAGE).rglob("*")):
        if path.is_file() and (path.suffix in PACKAGE_SUFFIXES or path.name == "py.typed"):
            found[path.relative_to(repo).as_posix()] = path.read_bytes()
    return found


def npu_sources(repo: Path = REPO) -> dict[str, bytes]:
    """The C++ of the torch_npu extension, by its path in the wheel; built where torch_npu is, by `npu/build.py`."""
    found = {}
    for folder, pattern in NPU_SOURCES:
        for path in sorted((repo / "csrc_npu" / folder).glob(pattern)):
            found[f"{NPU_PLACE}/{folder}/{path.name}"] = path.read_bytes()
    return found


def package_version(repo: Path = REPO) -> str:
    """`vllm_ascend_pd.__version__`, read without importing the package."""
    for node in ast.parse((repo / PACKAGE / "__init__.py").read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise EditInvalid(f"{PACKAGE}/__init__.py does not set __version__")
