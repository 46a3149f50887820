# SPDX-License-Identifier: Apache-2.0
"""Do all edits apply to all lanes? One table: edit file by lane or release, then every failure in full.

Each changed file is compiled; names that an edit leaves undefined, and imports of modules or names that we
do not have, are failures too. Lanes that share a release may differ in a file, so each is checked.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.fork.delta import REPO, EditFile, load_edits, new_modules, package_files
from tools.fork.errors import AnchorLost, ForkError
from tools.fork.index import Index
from tools.fork.lanes import load_lanes
from tools.fork.names import find_ruff, missing_imports, undefined_names
from tools.fork.patch import Patched, patch_tree
from tools.fork.payload import payload_lines
from tools.fork.releases import Target
from tools.fork.source import UpstreamTree

# The budget of reference/style.md: more than this is no longer a small delta.
MAX_EDIT_FILES = 25
MAX_PAYLOAD_LINES_IN_ALL = 60


@dataclass
class Column:
    """The result for one lane or release: a word for each edit file, and the messages of what failed."""

    title: str
    cells: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # why an edit limited to other releases would not fit


def check_tree(tree: UpstreamTree, edits: Sequence[EditFile], title: str, repo: Path = REPO) -> Column:
    """Apply `edits` to one tree and look at what came out."""
    column = Column(title)
    known = tree.release in {lane.release for lane in load_lanes(repo).values()}
    done = patch_tree(tree, list(edits), keep_going=True)
    changed = {edit.path: path for edit, path, _ in done.steps}
    for edit in edits:
        if not edit.applies_to(tree.release):
            why_not = "" if known else _why_not(tree, edit)
            column.cells[edit.path] = "–" if known else "(no)" if why_not else "(ok)"
            if why_not:
                column.notes[edit.path] = why_not
        elif edit.path in done.failures:
            error = done.failures[edit.path]
            column.cells[edit.path] = "LOST" if isinstance(error, AnchorLost) else "ERROR"
            column.problems.append(str(error) if isinstance(error, ForkError) else f"{edit.path}: {error!r}")
        else:
            column.cells[edit.path] = "ok"
    for name in sorted(set(new_modules(repo)) & set(tree.names())):
        column.problems.append(f"{name}: a new module of ours, but vLLM {tree.release} has that file already")
    for path, findings in _name_faults(tree, done, repo).items():
        for edit_path in [e for e, p in changed.items() if p == path]:
            column.cells[edit_path] = "NAMES"
        column.problems += [f"{path} of vLLM {tree.release} after the edits: {finding}" for finding in findings]
    return column


def _why_not(tree: UpstreamTree, edit: EditFile) -> str:
    """For a release that is no lane yet: why an edit limited to other releases does not fit it; empty if it does."""
    failed = patch_tree(tree, [replace(edit, lanes=None)], keep_going=True).failures
    return str(failed[edit.path]) if failed else ""


def _name_faults(tree: UpstreamTree, done: Patched, repo: Path) -> dict[str, list[str]]:
    ruff = find_ruff()
    ours = {**new_modules(repo), **package_files(repo)}
    faults = {}
    for path, edited in done.files.items():
        upstream = tree.read(path) or b""
        findings = missing_imports(edited, upstream, ours)
        if ruff is not None:
            findings += sorted(undefined_names(edited, ruff) - undefined_names(upstream, ruff))
        if findings:
            faults[path] = findings
    return faults


def check(targets: Sequence[Target], index: Index | None, repo: Path = REPO) -> list[Column]:
    """`check_tree` for each target, fetched where needed."""
    edits = load_edits(repo)
    return [check_tree(target.open(index), edits, target.name, repo) for target in targets]


def table(columns: Sequence[Column], edits: Sequence[EditFile]) -> str:
    """The result as text: one row for each edit file, one column for each target, the problems below."""
    width = max([len(edit.path) for edit in edits], default=0)
    titles = [f"{c.title:>10}" for c in columns]
    lines = [" ".join([f"{'edit file':<{width}} lines", *titles])]
    for edit in edits:
        own = sum(payload_lines(op) for op in edit.ops)
        cells = [f"{c.cells.get(edit.path, '?'):>{len(t)}}" for c, t in zip(columns, titles, strict=True)]
        lines.append(" ".join([f"{edit.path:<{width}} {own:>5}", *cells]))
    total = sum(payload_lines(op) for edit in edits for op in edit.ops)
    lines.append(
        f"{len(edits)} edit files (budget {MAX_EDIT_FILES}), {total} payload lines "
        f"(budget {MAX_PAYLOAD_LINES_IN_ALL}); names checked by "
        f"{'ruff' if find_ruff() else 'imports only (ruff is not installed)'}"
    )
    if any(cell.startswith("(") for column in columns for cell in column.cells.values()):
        lines.append("in brackets: limited to other releases by LANES; would it fit? Decide before a bump.")
    for column in columns:
        for problem in column.problems:
            lines.append(f"\n{column.title}:\n{textwrap.indent(problem, '  ')}")
    return "\n".join(lines)


def list_text(edits: Sequence[EditFile]) -> str:
    """Why each edit exists and when it may be dropped, for the verb `list`."""
    lines = []
    for edit in edits:
        releases = f"  [only {', '.join(edit.lanes)}]" if edit.lanes else ""
        lines.append(f"{edit.path}  ({len(edit.ops)} operations){releases}")
        for name in ("Why here", "Kind", "Forwarded", "Drop when"):
            text = textwrap.fill(edit.reason(name), 100, initial_indent=f"    {name:<11}", subsequent_indent=" " * 15)
            lines.append(text)
        lines.append("")
    lines.append(f"{len(edits)} edit files, {sum(len(e.ops) for e in edits)} operations")
    return "\n".join(lines)
