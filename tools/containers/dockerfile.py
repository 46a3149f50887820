# SPDX-License-Identifier: Apache-2.0
"""Reads a Dockerfile: stages, instructions, arguments. Pure. Only what ours uses; anything else is an error.

Next in the reading order: `images.py`, which carries the instructions out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tools.cache import CacheError

_IMAGE: Final = ("CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL", "USER")
KEYWORDS: Final = frozenset({"ARG", "FROM", "WORKDIR", *_IMAGE})
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class DockerfileError(CacheError):
    """The file says something that this reader does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    line: int
    keyword: str
    text: str  # after the keyword and the flags
    flags: tuple[str, ...] = ()  # "--mount=type=bind,…"

    @property
    def mounts(self) -> list[dict[str, str]]:
        """The `--mount` flags of a RUN, taken apart."""
        found = []
        for flag in self.flags:
            name, _, value = flag.partition("=")
            if name != "--mount":
                raise DockerfileError(f"line {self.line}: {self.keyword} {flag}: not known here")
            found.append(dict(part.partition("=")[::2] for part in value.split(",")))
        return found

    @property
    def words(self) -> list[str]:
        """A JSON list as it is, anything else as the shell would split it."""
        if self.text.startswith("["):
            return [str(word) for word in json.loads(self.text)]
        return shlex.split(self.text)

    @property
    def pairs(self) -> dict[str, str]:
        """Of ENV, LABEL and ARG: `NAME=value NAME=value`; the value of a bare name is empty."""
        return dict(word.partition("=")[::2] for word in shlex.split(self.text))


@dataclass(frozen=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str  # another stage's name, or an image
    instructions: tuple[Instruction, ...] = field(default=())

    def find(self, keyword: str) -> list[Instruction]:
        """All instructions of one kind, in order."""
        return [one for one in self.instructions if one.keyword == keyword]


def parse(text: str, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """The stages by name. `arguments` win over the defaults of the ARGs before the first FROM.

    Raises:
        DockerfileError: an instruction or a shape that is not read here.
    """
    known: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: tuple[str, str, list[Instruction]] | None = None

    def close() -> None:
        if current is not None:
            stages[current[0]] = Stage(current[0], current[1], tuple(current[2]))

    for one in _instructions(text):
        if one.keyword == "FROM":
            close()
            match = re.fullmatch(r"(\S+)\s+AS\s+(\S+)", one.text, re.IGNORECASE)
            if match is None:
                raise DockerfileError(f"line {one.line}: FROM without a name: {one.text}")
            current = (match[2], substitute(match[1], known), [])
        elif current is not None:
            # A bare name takes over the value from before the first FROM.
            is_global = one.keyword == "ARG" and one.text in known
            current[2].append(replace(one, text=f"{one.text}={known[one.text]}") if is_global else one)
        elif one.keyword == "ARG":
            known |= one.pairs | {name: v for name, v in (arguments or {}).items() if name in one.pairs}
        else:
            raise DockerfileError(f"line {one.line}: {one.keyword} before the first FROM")
    close()
    return stages


def substitute(text: str, values: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}`; an unknown name is an error, as it would be an empty word in the image."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise DockerfileError(f"{name} has no value in {text!r}")
        return values[name]

    return _VARIABLE.sub(value, text)


def read(path: Path, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """`parse` of a file."""
    return parse(path.read_text(), arguments)


def _instructions(text: str) -> Iterator[Instruction]:
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start if pending else number
        pending = f"{pending} {line}".strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        yield _instruction(start, pending)
        pending = ""
    if pending:
        raise DockerfileError(f"line {start}: the file ends in the middle of {pending.split()[0]}")


def _instruction(line: int, text: str) -> Instruction:
    keyword, _, rest = text.partition(" ")
    if keyword not in KEYWORDS:
        raise DockerfileError(f"line {line}: {keyword} is not known here")
    words = rest.split()
    flags = []
    while words and words[0].startswith("--") and keyword in ("RUN", "COPY", "HEALTHCHECK"):
        flags.append(words.pop(0))
        rest = rest.partition(flags[-1])[2].strip()
    return Instruction(line, keyword, rest.strip(), tuple(flags))
