# SPDX-License-Identifier: Apache-2.0
"""The lanes of `vllm/UPSTREAM.toml`: upstream release, artefact by machine, and what it pairs with."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.fork.delta import REPO
from tools.fork.errors import ForkError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

UPSTREAM_TOML = "vllm/UPSTREAM.toml"


@dataclass(frozen=True)
class Artefact:
    """One file of an upstream project on the package index, pinned by its hash."""

    project: str
    name: str
    sha256: str

    @property
    def is_wheel(self) -> bool:
        """Whether this is a wheel (else an sdist)."""
        return self.name.endswith(".whl")


@dataclass(frozen=True)
class Lane:
    """One upstream release that we build from; `artefacts` by machine name, or "any"."""

    name: str
    release: str
    torch: str
    pairs_with: str
    artefacts: dict[str, Artefact]
    requires_python: str | None = None  # None: upstream's own range
    extras: dict[str, tuple[str, ...]] = field(default_factory=dict)  # what the wheel asks for only when named
    npu: bool = False  # whether the sources of the torch_npu extension go into the wheel

    def artefact(self, machine: str | None = None) -> Artefact:
        """The artefact for `machine` (this one when None).

        Raises:
            ForkError: upstream publishes none for that machine.
        """
        machine = machine or platform.machine()
        found = self.artefacts.get(machine) or self.artefacts.get("any")
        if found is None:
            known = ", ".join(sorted(self.artefacts))
            raise ForkError(f"lane {self.name!r} has no artefact for machine {machine!r}; it has: {known}")
        return found

    def readable_artefact(self) -> Artefact:
        """An artefact to read Python from: this machine's, else any (their Python is the same)."""
        return self.artefacts.get(platform.machine()) or next(iter(self.artefacts.values()))


def load_lanes(repo: Path = REPO) -> dict[str, Lane]:
    """All lanes in file order.

    Raises:
        ForkError: a field is missing or malformed; names lane, field and value.
    """
    tables = read_toml(repo / UPSTREAM_TOML).get("lane", {})
    return {name: _lane(name, table) for name, table in tables.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict.

    Raises:
        ForkError: it cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ForkError(f"{path}: {error}") from error


def _lane(name: str, table: dict[str, Any]) -> Lane:
    where = f"{UPSTREAM_TOML}: lane {name!r}"
    project = _text(table, "project", where)
    artefacts = {}
    for machine, entry in table.get("artefact", {}).items():
        at = f"{where}: artefact {machine!r}"
        sha256 = _text(entry, "sha256", at)
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ForkError(f"{at}: sha256 is no sha256 in lower-case hex: {sha256!r}")
        artefacts[machine] = Artefact(project, _text(entry, "name", at), sha256)
    if not artefacts:
        raise ForkError(f"{where}: has no artefact")
    fields = {key: _text(table, key, where) for key in ("release", "torch", "pairs_with")}
    python = _text(table, "requires_python", where) if "requires_python" in table else None
    npu = table.get("npu", False)
    if not isinstance(npu, bool):
        raise ForkError(f"{where}: npu must be true or false, is {npu!r}")
    return Lane(name, artefacts=artefacts, requires_python=python, extras=_extras(table, where), npu=npu, **fields)


def _extras(table: dict[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    extras = table.get("extras", {})
    for name, requirements in extras.items():
        if not isinstance(requirements, list) or not all(isinstance(r, str) and r for r in requirements):
            raise ForkError(f"{where}: extras: {name!r} must be a list of requirements, is {requirements!r}")
    return {name: tuple(requirements) for name, requirements in extras.items()}


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise ForkError(f"{where}: {key} must be a non-empty text, is {value!r}")
    return value


def get_lane(name: str, repo: Path = REPO) -> Lane:
    """One lane by name.

    Raises:
        ForkError: there is no such lane.
    """
    lanes = load_lanes(repo)
    if name not in lanes:
        raise ForkError(f"--lane {name!r} is not one of: {', '.join(lanes)}")
    return lanes[name]
