# SPDX-License-Identifier: Apache-2.0
"""Markdown that the pages are made of: tables, code spans, the note at the head of each page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `python -m tools.reference write` from the code. Do not edit: change the code. -->"


def code(text: object) -> str:
    """A code span; empty for nothing."""
    shown = str(text)
    return f"`{shown}`" if shown else ""


def codes(values: Iterable[object]) -> str:
    """Several code spans."""
    return ", ".join(code(value) for value in values)


def cell(text: str) -> str:
    """One line that cannot end its table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a row's cells are Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell(text) for text in row)} |" for row in rows]
    return "\n".join(lines)


def page(title: str, *parts: str) -> str:
    """A whole page, with a line feed at its end."""
    return "\n\n".join([f"# {title}", NOTE, *(part.strip("\n") for part in parts if part)]) + "\n"


def first_paragraph(docstring: str | None) -> str:
    """What a docstring says before its first empty line, on one line."""
    return " ".join((docstring or "").strip().split("\n\n")[0].split())
