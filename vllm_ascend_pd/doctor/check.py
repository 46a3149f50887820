# SPDX-License-Identifier: Apache-2.0
"""One line of the doctor's answer (`Check`), all of them (`Report`), and the JSON form. Plain data; no thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from vllm_ascend_pd.errors import PDConfigError

# Of the JSON document. It grows when a key is removed or changes its meaning; new keys and new checks do not count.
FORMAT: Final = 1

EXIT_OK: Final = 0
EXIT_FAIL: Final = 1


class State(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"  # works, but worse or less safely than it could
    FAIL = "fail"  # prefill/decode does not work like this
    NOT_APPLICABLE = "not applicable"  # nothing to check here; `seen` says why


@dataclass(frozen=True)
class Check:
    """`key` is `group.name` and never changes its meaning; `todo` is empty when there is nothing to do."""

    key: str
    state: State
    seen: str
    todo: str = ""

    @property
    def group(self) -> str:
        """What it is about: software, memory, network …"""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """For people."""
        return self.key.partition(".")[2].replace("-", " ")

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}" + (f"; {self.todo}" if self.todo else "")

    def to_dict(self) -> dict[str, str]:
        """For the JSON document."""
        return {"check": self.key, "status": self.state.value, "seen": self.seen, "todo": self.todo}


def ok(key: str, seen: str) -> Check:
    """Nothing to do."""
    return Check(key, State.OK, seen)


def warn(key: str, seen: str, todo: str) -> Check:
    """It works, but."""
    return Check(key, State.WARN, seen, todo)


def fail(key: str, seen: str, todo: str) -> Check:
    """It does not work."""
    return Check(key, State.FAIL, seen, todo)


def not_applicable(key: str, why: str) -> Check:
    """There is nothing to check here."""
    return Check(key, State.NOT_APPLICABLE, why)


@dataclass
class Report:
    """All checks of one run, in the order in which they are told."""

    about: str  # host name, and the peer where there is one
    checks: list[Check] = field(default_factory=list)

    def add(self, checks: Iterable[Check]) -> None:
        """Append."""
        self.checks += checks

    def count(self, state: State) -> int:
        """Checks that ended so."""
        return sum(1 for check in self.checks if check.state is state)

    @property
    def exit_code(self) -> int:
        """1 when anything fails; warnings do not count."""
        return EXIT_FAIL if self.count(State.FAIL) else EXIT_OK

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "format": FORMAT,
            "about": self.about,
            "exit_code": self.exit_code,
            "counts": {state.value: self.count(state) for state in State},
            "checks": [check.to_dict() for check in self.checks],
        }


def refuse_failed(checks: Iterable[Check]) -> None:
    """Stop a start, in the doctor's words.

    Raises:
        PDConfigError: a check fails; one line for each.
    """
    failed = [str(check) for check in checks if check.state is State.FAIL]
    if failed:
        raise PDConfigError("\n  ".join(failed))
