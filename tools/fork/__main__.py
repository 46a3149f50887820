# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.fork VERB`: the command line; each verb is one function of another module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.fork.errors import ForkError


def build_parser() -> argparse.ArgumentParser:
    """The verbs and their flags."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fork", description="Keep and build the fork: vLLM plus the delta in vllm/."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    over = verbs.add_parser(
        "overlay",
        help="development aid: apply the delta in place over an installed vLLM",
        description="Development aid, not the way to install: applies all current edits in place over the "
        "vLLM in SITE_PACKAGES and links our new modules and vllm_ascend_pd there. Originals are kept in "
        "vllm/.pd-pristine/, and each run starts from them, so run it again after every change.",
    )
    over.add_argument("--site", type=Path, required=True, metavar="SITE_PACKAGES")
    over.add_argument("--remove", action="store_true", help="put upstream's files back and stop")
    over.add_argument("--keep-going", action="store_true", help="leave out edits that do not apply")
    over.set_defaults(run=run_overlay)
    return parser


def run_overlay(args: argparse.Namespace) -> int:
    """The verb `overlay`."""
    from tools.fork.overlay import overlay

    done = overlay(args.site, remove=args.remove, keep_going=args.keep_going)
    for edit, path, _ in done.steps:
        print(f"{edit.path} -> {path}")
    for error in done.failures.values():
        print(f"NOT APPLIED: {error}", file=sys.stderr)
    print(f"{'removed from' if args.remove else 'overlaid on'} {args.site}: {len(done.files)} files edited")
    return 1 if done.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; errors that a person can act on are one message without a traceback."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
