# SPDX-License-Identifier: Apache-2.0
"""`commands.md`: the verbs of `vllm pd` and their options, from their argparse parsers."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Final

from tools.reference.markdown import code, page, table
from vllm_ascend_pd.up.cli import _OWN_PARSERS, build_parser

# Defaults that are those of the machine on which the page is written.
VARYING: Final = {"--threads": "the CPUs of the process", "--peers-python": "this interpreter"}


def find_parsers() -> dict[str, argparse.ArgumentParser]:
    """`verb` or `verb subverb` -> its parser, in the order of the help."""
    found: dict[str, argparse.ArgumentParser] = {}
    for verb, parser in subparsers(build_parser()):
        own = load_parser(verb)
        if own is None:
            found[verb] = parser
            continue
        inner = list(subparsers(own))
        found |= {f"{verb} {name}": sub for name, sub in inner} if inner else {verb: own}
    return found


def load_parser(verb: str) -> argparse.ArgumentParser | None:
    """The parser of a verb that has one of its own (`build_parser` of its module); None for the others."""
    if verb not in _OWN_PARSERS or importlib.util.find_spec(_OWN_PARSERS[verb][0]) is None:
        return None
    parser: argparse.ArgumentParser = importlib.import_module(_OWN_PARSERS[verb][0]).build_parser()
    return parser


def subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of the subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    """(spelling, help) of one argument."""
    metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    if not metavar and action.nargs != 0:
        metavar = action.dest.upper()
    shown = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    repeats = "…" if action.nargs in ("+", "*") else ""
    if not action.option_strings:
        return code(f"{shown}{repeats}"), help_of(parser, action)
    names = ", ".join(action.option_strings)
    return code(f"{names} {shown}{repeats}".strip()), help_of(parser, action)


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help text with its placeholders filled in."""
    text = action.help or ""
    for flag in action.option_strings:
        if flag in VARYING:
            text = text.replace("%(default)s", VARYING[flag])
    values = {**vars(action), "prog": parser.prog}
    return text % values if "%" in text else text


def render() -> str:
    """The page."""
    parts = []
    for verb, parser in find_parsers().items():
        rows = [
            option_row(parser, action)
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS
        ]
        parts += [f"## `vllm pd {verb}`", (parser.description or "").split("\n\n")[0]]
        parts.append(table(("argument", "what it does"), rows) if rows else "No arguments.")
        if verb == "up":
            parts.append("Everything after `--` goes to `vllm serve` of every instance.")
    return page("`vllm pd`", "Each verb answers `--help`.", *parts)
