# SPDX-License-Identifier: Apache-2.0
"""`vllm pd VERB …`: a thin subcommand; parsing and work are in `vllm_ascend_pd.up.cli`.

New module of the fork, registered by `main.edit.py`. Runs in the `vllm` command's own process.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm.entrypoints.cli.types import CLISubcommand

from vllm_ascend_pd.up.cli import build_parser, main


class PDSubcommand(CLISubcommand):
    """Hands everything after `vllm pd` on as it was written, `--` included."""

    name = "pd"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the verb and exit with its code. Python's argparse eats a `--`, so the words come from sys.argv."""
        sys.exit(main(sys.argv[2:]))

    def subparser_init(self, subparsers: Any) -> Any:
        """Register `pd`; its words are parsed later, by our own parser."""
        ours = build_parser()
        parser = subparsers.add_parser(
            self.name,
            help="Prefill/decode disaggregation: start a whole deployment, show its status.",
            description=ours.description,
            usage=ours.format_usage().removeprefix("usage: "),
        )
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="VERB", help="up, status")
        return parser


def cmd_init() -> list[CLISubcommand]:
    """What upstream's CLI calls for each of its modules."""
    return [PDSubcommand()]
