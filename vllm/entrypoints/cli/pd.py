# SPDX-License-Identifier: Apache-2.0
"""`vllm pd` in the list of subcommands that `vllm --help` prints.

New module of the fork, registered by `main.edit.py`, whose other edit runs the command itself before upstream's
parser is built: see `vllm_ascend_pd.up.cli`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm.entrypoints.cli.types import CLISubcommand

from vllm_ascend_pd.up.cli import run_pd_command


class PDSubcommand(CLISubcommand):
    """A line of help; the words after `vllm pd` are never parsed here."""

    name = "pd"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Reached only by a caller that built upstream's parser itself."""
        run_pd_command(sys.argv)

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the line."""
        parser = subparsers.add_parser(
            self.name, help="Prefill/decode disaggregation: start a whole deployment, show its status, measure."
        )
        parser.add_argument("words", nargs=argparse.REMAINDER)
        return parser


def cmd_init() -> list[CLISubcommand]:
    """What upstream's CLI calls for each of its modules."""
    return [PDSubcommand()]
