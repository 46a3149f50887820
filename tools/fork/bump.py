# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.fork bump --release X`: all that a bump to an upstream release needs to know. Changes nothing.

The pins with the hashes that the index tells, the torch that the release is built against, each edit re-anchored or
lost with what is there now, the connector contract, and imports. `docs/bump.md` says what to do with it.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tools.fork.check import Column, check_tree, table
from tools.fork.contract import connector_changes, hook_faults, lost_imports, modules_of
from tools.fork.delta import REPO, EditFile, load_edits
from tools.fork.errors import ArtefactError
from tools.fork.index import Index, RemoteFile
from tools.fork.lanes import Artefact, Lane
from tools.fork.releases import target_of_lane, target_of_release
from tools.fork.source import UpstreamTree


def report(lane: Lane, release: str, index: Index | None, repo: Path = REPO) -> tuple[str, bool]:
    """The report as text, and whether the delta is ready for that release as it is."""
    target = target_of_release(release, index)
    new, old = target.open(index), target_of_lane(lane).open(index)
    edits = load_edits(repo)
    column = check_tree(new, edits, release, repo)
    parts = [
        f"Bump of lane {lane.name}: {lane.release} -> {release}",
        _section("Pins (vllm/UPSTREAM.toml)", pin_lines(lane, release, index)),
        _section("Torch", [torch_line(lane, target.path(index))]),
        _section("Edits", [table([column], edits), *limited_lines(column, lane, edits)]),
    ]
    broken = _contract(old, new, repo, parts)
    return "\n\n".join(parts), not (column.problems or broken)


def _contract(old: UpstreamTree, new: UpstreamTree, repo: Path, parts: list[str]) -> list[str]:
    before, after = modules_of(old), modules_of(new)
    broken = hook_faults(after, repo)
    lost = lost_imports(before, after, repo)
    changes = connector_changes(before, after)
    parts.append(_section("Connector hooks that do not bind", broken or ["none"]))
    parts.append(_section(f"The connector's base since {old.release}", changes or ["unchanged"]))
    parts.append(_section("Imports of ours that are gone", lost or ["none"]))
    return broken + lost


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, "-" * len(title), *lines])


def pin_lines(lane: Lane, release: str, index: Index | None) -> list[str]:
    """The lane's table for that release, to be pasted; or why there is none."""
    if index is None:
        return ["offline: the index was not asked for files and hashes"]
    lines = [f"[lane.{lane.name}]", f'release = "{release}"']
    for machine, artefact in lane.artefacts.items():
        found = find_artefact(index.files(artefact.project), artefact, lane.release, release, machine)
        if isinstance(found, str):
            lines.append(f"# {machine}: {found}")
        else:
            lines += ["", f"[lane.{lane.name}.artefact.{machine}]"]
            lines += [f'name = "{found.name}"', f'sha256 = "{found.sha256}"']
    return lines


def find_artefact(
    files: Sequence[RemoteFile], artefact: Artefact, old: str, release: str, machine: str
) -> RemoteFile | str:
    """The file that takes the place of a pinned one; a sentence where the index has none, or no hash of it."""
    wanted = re.escape(artefact.name).replace(re.escape(old), re.escape(release))
    if artefact.is_wheel:  # the platform's tag may change from release to release
        stem = f"{artefact.project.replace('-', '_')}-{release}-"
        wanted = re.escape(stem) + rf"\S*{machine}\S*\.whl"
    hits = [file for file in files if re.fullmatch(wanted, file.name)]
    if not hits:
        return f"the index has no file of {artefact.project} {release} for it"
    if hits[0].sha256 is None:
        return f"the index gives no hash for {hits[0].name}: fetch it and compute one"
    return hits[0]


def torch_line(lane: Lane, sdist: Path) -> str:
    """Which torch upstream asks for on CPU, read in the sdist."""
    if sdist.suffix == ".whl":
        return "not read: the release has no sdist on this index"
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                if member.name.partition("/")[2] == "requirements/cpu.txt":
                    stream = archive.extractfile(member)
                    assert stream is not None
                    found = sorted(set(re.findall(r"^torch\s*==\s*([0-9.]+)", stream.read().decode(), re.MULTILINE)))
                    return (
                        f"requirements/cpu.txt asks for torch {' and '.join(found) or '?'}; the lane has {lane.torch}"
                    )
    except tarfile.TarError as error:
        raise ArtefactError(f"{sdist.name}: {error}") from error
    return "the sdist has no requirements/cpu.txt"


def limited_lines(column: Column, lane: Lane, edits: Sequence[EditFile]) -> list[str]:
    """What to decide about edits that are limited to releases and serve this lane now."""
    lines = []
    for edit in edits:
        cell = column.cells.get(edit.path, "")
        if edit.lanes and lane.release in edit.lanes and cell.startswith("("):
            what = "fits: add the release to LANES" if cell == "(ok)" else "does not fit any more"
            lines.append(
                f"{edit.path}: limited to {', '.join(edit.lanes)}; {what}. Drop when: {edit.reason('Drop when')}"
            )
            lines += [f"  {line}" for line in column.notes.get(edit.path, "").splitlines()]
    return lines
