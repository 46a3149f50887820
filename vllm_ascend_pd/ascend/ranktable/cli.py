# SPDX-License-Identifier: Apache-2.0
"""The command line of `vllm pd ranktable`: generate, check, show.

`up/cli.py` adds `ranktable` to its verbs and calls `main`. `generate` is in `generate.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_pd.ascend.devices import DeviceError, System, inventory, local_addresses
from vllm_ascend_pd.ascend.ranktable.check import check_text
from vllm_ascend_pd.ascend.ranktable.check_host import check_host
from vllm_ascend_pd.ascend.ranktable.generate import add_generate_arguments, run_generate
from vllm_ascend_pd.ascend.ranktable.lines import MAX_CHARS
from vllm_ascend_pd.ascend.ranktable.model import Problem, RankTable
from vllm_ascend_pd.ascend.ranktable.show import describe_size, print_table, printable, table_as_json
from vllm_ascend_pd.config import primary_host
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.signals import sigterm_as_interrupt

INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """All three commands."""
    parser = argparse.ArgumentParser(
        prog="vllm pd ranktable",
        description="Rank tables of Ascend hosts. Instances exchange their devices by themselves and need none; these "
        "commands are for those who need the file.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="write a table of this host's devices, or of several hosts",
        description="Read this host's NPUs from the system and write a rank table. For several hosts run it on each: "
        "one collects (--collect, --hosts), the others send (--send-to); all get the same table.",
    )
    add_generate_arguments(generate)
    check = commands.add_parser(
        "check",
        help="say everything that is wrong with a table",
        description="Check a table of any of the three formats, also against this host's devices. Exit code 1 when "
        "something is wrong; warnings alone give 0.",
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--offline", action="store_true", help="do not compare with this host")
    check.add_argument("--server-id", default="", metavar="TEXT", help="what this host is called in the table")
    check.add_argument("--json", action="store_true", help="print the problems as JSON")
    show = commands.add_parser("show", help="print a table's devices", description="Print the devices of a table.")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--json", action="store_true", help="print the devices as JSON")
    return parser


def main(arguments: Sequence[str], system: System | None = None) -> int:
    """Run one command: 1 for a failure or a wrong table, 2 for a wrong command line, 130 after Ctrl-C."""
    parsed = build_parser().parse_args(arguments)
    try:
        with sigterm_as_interrupt():
            if parsed.command == "generate":
                return run_generate(parsed, system or System())
            text = _read_file(parsed.file)
            if parsed.command == "check":
                return run_check(parsed, text, system or System())
            return run_show(parsed, text)
    except PDError as error:
        print(f"vllm pd ranktable {parsed.command}: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED


def run_check(parsed: argparse.Namespace, text: str, system: System) -> int:
    """Print all problems; 1 when one of them is a failure."""
    scan = check_text(text)
    problems = list(scan.problems)
    note = ""
    if scan.table is not None and not parsed.offline:
        found, note = _compare(scan.table, parsed.server_id, system)
        problems = sorted([*problems, *found], key=lambda problem: problem.line)
    failures = sum(problem.level == "fail" for problem in problems)
    if parsed.json:
        rows = [{name: getattr(problem, name) for name in Problem.__dataclass_fields__} for problem in problems]
        print(json.dumps({"file": str(parsed.file), "ok": not failures, "problems": rows, "note": note}, indent=2))
        return 1 if failures else 0
    for problem in problems:
        field = f"{problem.field}: " if problem.field else ""
        line = f"{parsed.file}:{problem.line}: {problem.level}: {field}{problem.message}; {problem.action}"
        print(printable(line))
    if note:
        print(printable(note))
    print(printable(_summary(scan.table, failures, len(problems) - failures)))
    return 1 if failures else 0


def run_show(parsed: argparse.Namespace, text: str) -> int:
    """Print the devices; with problems only when nothing could be read."""
    scan = check_text(text)
    if scan.table is None:
        for problem in scan.problems:
            print(printable(f"{parsed.file}:{problem.line}: {problem.level}: {problem.message}"), file=sys.stderr)
        return 1
    if parsed.json:
        print(table_as_json(scan.table))
    else:
        print_table(scan.table)
    if any(problem.level == "fail" for problem in scan.problems):
        print(f"this table has problems: vllm pd ranktable check {parsed.file}", file=sys.stderr)
        return 1
    return 0


def _compare(table: RankTable, server_id: str, system: System) -> tuple[list[Problem], str]:
    """Problems against this host, or why it was not compared."""
    try:
        found = inventory(system)
    except DeviceError as error:
        return [], f"not compared with this host: {error}"
    names = local_addresses(system) - {"127.0.0.1", "::1"} | {system.environ.get("VLLM_HOST_IP") or primary_host()}
    notes = "; ".join(str(finding) for finding in found.findings)
    return check_host(table, found, names | ({server_id} if server_id else set())), notes and f"this host: {notes}"


def _summary(table: RankTable | None, failures: int, warnings: int) -> str:
    if table is None:
        return "no rank table could be read"
    what = f"{table.format} table, version {table.version}: {describe_size(table)}"
    if not failures and not warnings:
        return f"{what}: no problem found"
    return f"{what}: {failures} failures, {warnings} warnings"


def _read_file(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="strict") as file:
            return file.read(MAX_CHARS + 1)
    except UnicodeDecodeError as error:
        raise PDConfigError(f"{path}: is no text: byte {error.start} is not UTF-8; is it the right file?") from None
    except OSError as error:
        raise PDConfigError(f"{path}: cannot be read: {error.strerror}") from None
