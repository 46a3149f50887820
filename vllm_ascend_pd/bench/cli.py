# SPDX-License-Identifier: Apache-2.0
"""The command line of the benches: `vllm pd bench …` and `python -m vllm_ascend_pd.bench …`.

`up/cli.py` adds `bench` to its verbs and calls `main`. Imports of the benches come late: `vllm pd up` needs none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.signals import sigterm_as_interrupt

INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Both benches."""
    from vllm_ascend_pd.bench.stages.command import add_stages_arguments
    from vllm_ascend_pd.bench.transfer.command import add_transfer_arguments

    parser = argparse.ArgumentParser(
        prog="vllm pd bench", description="Measure how KV moves, beside peers and the machine's limits."
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    stages = benches.add_parser(
        "stages",
        help="extract, scatter, pull and inject: per layer against all layers in one call",
        description="One process: per sequence length the time of save (extract + scatter) and load (pull + inject), "
        "stage by stage and without syncs, for a loop over layers and for one fused call; then the ratios for one "
        "block and for a large request.",
    )
    add_stages_arguments(stages)
    transfer = benches.add_parser(
        "transfer",
        help="GB/s between two processes by piece size: ours, NIXL, Mooncake, gloo, and the limits",
        description="Move a payload in pieces between random places of two processes' pools. All contenders take "
        "turns in random order, every byte is verified outside the timed part, each peer runs at the best of its "
        "settings.",
    )
    add_transfer_arguments(transfer)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one bench; 1 for a failure, 2 for a wrong command line, 130 after Ctrl-C."""
    parsed = build_parser().parse_args(arguments)
    argv = ["vllm", "pd", "bench", *arguments]
    try:
        with sigterm_as_interrupt():
            if parsed.bench == "stages":
                from vllm_ascend_pd.bench.stages.command import run_stages

                return run_stages(parsed, argv)
            from vllm_ascend_pd.bench.transfer.command import run_transfer

            return run_transfer(parsed, argv)
    except PDError as error:
        print(f"vllm pd bench {parsed.bench}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
