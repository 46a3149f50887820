# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.ascend VERB`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cache import CacheError
from tools.fork.errors import ForkError


def build_parser() -> argparse.ArgumentParser:
    """The verbs and their flags."""
    parser = argparse.ArgumentParser(prog="python -m tools.ascend", description="Check our delta beside vllm-ascend.")
    parser.add_argument("--index-url", metavar="URL", help="package index (default: $PIP_INDEX_URL, else PyPI)")
    parser.add_argument("--offline", action="store_true", help="use the cache only, never the network")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("fetch", help="bring vllm-ascend's sdist into the cache")
    verb.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="copy from a folder, no network")
    verb.set_defaults(run=run_fetch)
    verb = verbs.add_parser("check", help="hooks, edits in replaced code, layer hooks")
    verb.set_defaults(run=run_check)
    verb = verbs.add_parser("crossings", help="print each edit in replaced code with its verdict")
    verb.set_defaults(run=run_crossings)
    verb = verbs.add_parser(
        "beside", help="import our vLLM beside vllm-ascend's Python, in lane ascend-cpu's environment"
    )
    verb.add_argument("--python", type=Path, help="of an environment that has it (default: made and kept in the cache)")
    verb.set_defaults(run=run_beside)
    return parser


def run_fetch(args: argparse.Namespace) -> int:
    """The verb `fetch`."""
    from tools.ascend.sources import SDIST
    from tools.fork.cache import adopt, require
    from tools.fork.index import Index

    if args.folder is not None:
        adopt(SDIST, args.folder)
    print(require(SDIST, None if args.offline else Index(args.index_url)))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """The verb `check`."""
    from tools.ascend.check import check_all
    from tools.ascend.sources import RELEASE, load_modules
    from tools.fork.index import Index

    found = check_all(load_modules(None if args.offline else Index(args.index_url)))
    print("\n".join(found) or f"vllm-ascend {RELEASE}: hooks fit, every edit in replaced code is reviewed")
    return 1 if found else 0


def run_crossings(args: argparse.Namespace) -> int:
    """The verb `crossings`."""
    from tools.ascend.check import find_crossings
    from tools.ascend.overrides import find_overrides
    from tools.ascend.reviewed import REVIEWED
    from tools.ascend.sources import load_modules
    from tools.fork.delta import load_edits
    from tools.fork.index import Index

    modules = load_modules(None if args.offline else Index(args.index_url))
    for crossing in find_crossings(load_edits(), modules, find_overrides(modules)):
        print(f"{crossing.edit} {crossing.scope}\n    {crossing.override.where}\n    {REVIEWED.get(crossing.key)}")
    return 0


def run_beside(args: argparse.Namespace) -> int:
    """The verb `beside`."""
    from tools.ascend.beside import run_probe, unpack
    from tools.ascend_cpu.env import environment
    from tools.fork.index import Index

    sources = unpack(None if args.offline else Index(args.index_url))
    if args.python is not None:
        return run_probe(args.python, sources)
    with environment() as made:
        return run_probe(made.python, sources)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except (ForkError, CacheError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
