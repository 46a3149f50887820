# SPDX-License-Identifier: Apache-2.0
"""Pure: JSON whose every value knows its line. Bounded in size and depth; strict otherwise, as `json` is.

The standard parser forgets positions, and a table of a thousand devices is of no use without them.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass
from typing import Final

MAX_CHARS: Final = 16 << 20
MAX_DEPTH: Final = 16

_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """A value and the line that it begins on. `keys` are the lines of an object's keys."""

    value: Scalar | list[Node] | dict[str, Node]
    line: int

    @property
    def kind(self) -> str:
        """What people call such a value."""
        if isinstance(self.value, bool):
            return "true or false"
        names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
        return names.get(type(self.value), "null")


class NotJson(ValueError):
    """Says what was expected, and carries the line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def parse(text: str) -> Node:
    """The one value in `text`.

    Raises:
        NotJson: it is none, too large, too deep, or an object has a key twice.
    """
    if len(text) > MAX_CHARS:
        raise NotJson(1, f"the file has {len(text)} characters, at most {MAX_CHARS} are read")
    parser = _Parser(text)
    node = parser.read_value(0)
    parser.skip()
    if parser.at < len(text):
        raise parser.wrong("nothing after the table")
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self.at = 0

    def line(self, at: int) -> int:
        return bisect.bisect_left(self._breaks, at) + 1

    def wrong(self, expected: str) -> NotJson:
        found = self._text[self.at : self.at + 20].split("\n", 1)[0]
        return NotJson(
            self.line(self.at),
            f"not JSON: expected {expected}, found {found!r}"
            if found
            else f"not JSON: expected {expected}, but the line ends",
        )

    def skip(self) -> str:
        """Go behind blanks; the next character, empty at the end."""
        match = _BLANKS.match(self._text, self.at)
        self.at = match.end() if match else self.at
        return self._text[self.at : self.at + 1]

    def read_value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise NotJson(self.line(self.at), f"not a rank table: nested deeper than {MAX_DEPTH}")
        first = self.skip()
        start = self.line(self.at)
        if first == "{":
            return Node(self._read_object(depth), start)
        if first == "[":
            return Node(self._read_list(depth), start)
        if first == '"':
            return Node(self._read_string(), start)
        match = _NUMBER.match(self._text, self.at)
        if match:
            self.at = match.end()
            return Node(self._number(match[0]), start)
        for word, value in _WORDS.items():
            if self._text.startswith(word, self.at):
                self.at += len(word)
                return Node(value, start)
        raise self.wrong("a value")

    def _number(self, digits: str) -> int | float:
        if len(digits) > 40:
            raise NotJson(self.line(self.at), f"a number of {len(digits)} digits")
        value: int | float = json.loads(digits)
        return value

    def _read_string(self) -> str:
        match = _STRING.match(self._text, self.at)
        if match is None:
            raise self.wrong("a text that ends with a quote on the same line")
        try:
            value: str = json.loads(match[0])
        except ValueError:
            raise self.wrong("a text with known escapes") from None
        self.at = match.end()
        return value

    def _read_list(self, depth: int) -> list[Node]:
        self.at += 1
        values: list[Node] = []
        if self.skip() == "]":
            self.at += 1
            return values
        while True:
            values.append(self.read_value(depth + 1))
            if not self._goes_on("]"):
                return values

    def _read_object(self, depth: int) -> dict[str, Node]:
        self.at += 1
        members: dict[str, Node] = {}
        if self.skip() == "}":
            self.at += 1
            return members
        while True:
            if self.skip() != '"':
                raise self.wrong("a key in quotes")
            line = self.line(self.at)
            key = self._read_string()
            if key in members:
                raise NotJson(line, f"key {key[:60]!r} is there twice in one object")
            if self.skip() != ":":
                raise self.wrong("`:`")
            self.at += 1
            members[key] = self.read_value(depth + 1)
            if not self._goes_on("}"):
                return members

    def _goes_on(self, end: str) -> bool:
        separator = self.skip()
        if separator not in (",", end):
            raise self.wrong(f"`,` or `{end}`")
        self.at += 1
        return separator == ","
