# SPDX-License-Identifier: Apache-2.0
"""`vllm pd bench stages`: arguments into a plan, a run, tables and files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.arguments import add_output_arguments, parse_size, parse_sizes
from vllm_ascend_pd.bench.machine import count_cpus, describe_machine, describe_run
from vllm_ascend_pd.bench.output import check_outputs, make_console, write_json
from vllm_ascend_pd.bench.progress import BenchProgress
from vllm_ascend_pd.bench.ratios import format_bytes
from vllm_ascend_pd.bench.stages.shapes import SHAPES, KVShape
from vllm_ascend_pd.errors import PDConfigError, nearest
from vllm_ascend_pd.memory.available import read_available_memory

LENGTHS: Final = "1K,4K,16K,32K"
QUICK_LENGTHS: Final = "1K,4K"
ROUNDS, QUICK_ROUNDS = 7, 3
BLOCK_SIZE: Final = 16
_MEMORY_PARTS: Final = 3  # a third of what is available


def add_stages_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    names = ",".join(shape.name for shape in SHAPES)
    parser.add_argument("--shapes", metavar="NAMES", help=f"KV shapes, separated by commas (default: {names})")
    parser.add_argument(
        "--lengths",
        metavar="TOKENS",
        help=f"sequence lengths, K is 1024 (default: {LENGTHS}; --quick: {QUICK_LENGTHS})",
    )
    parser.add_argument(
        "--block-size", type=int, default=BLOCK_SIZE, metavar="N", help="tokens per block (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"rounds that count (default: {ROUNDS}; --quick: {QUICK_ROUNDS})"
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="for pools and staging together, for example 6G; a request that does not fit is worked in passes over its "
        "layers (default: a third of the available memory)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=count_cpus(),
        metavar="N",
        help="most that torch, our copies and the copy limit may use; each uses fewer where that is faster "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of places and order (default: 1)")
    parser.add_argument("--quick", action="store_true", help="short lengths, few rounds: a try, not a measurement")
    add_output_arguments(parser)


def choose_shapes(names: str | None) -> tuple[KVShape, ...]:
    """Raises PDConfigError."""
    if names is None:
        return SHAPES
    known = {shape.name: shape for shape in SHAPES}
    for name in names.split(","):
        if name not in known:
            raise PDConfigError(f"--shapes: no shape {name!r}{nearest(name, known)}")
    return tuple(known[name] for name in names.split(","))


def run_stages(parsed: argparse.Namespace, argv: Sequence[str]) -> int:
    """The command. Raises PDError, also for wrong bytes."""
    check_outputs(parsed.json, parsed.plot)
    native.load_library()
    try:
        from vllm_ascend_pd.bench.stages.run import StagesPlan, StagesRun
    except ImportError as error:
        raise PDConfigError(f"bench stages needs torch, which is not installed: {error}") from None
    available = read_available_memory().num_bytes
    max_bytes = available // _MEMORY_PARTS
    if parsed.max_memory is not None:
        max_bytes = parse_size("--max-memory", parsed.max_memory)
    if max_bytes > available:
        raise PDConfigError(f"--max-memory: {format_bytes(max_bytes)} wanted, {format_bytes(available)} available")
    rounds = parsed.rounds if parsed.rounds is not None else (QUICK_ROUNDS if parsed.quick else ROUNDS)
    for flag, value in (("--rounds", rounds), ("--threads", parsed.threads), ("--block-size", parsed.block_size)):
        if value < 1:
            raise PDConfigError(f"{flag} must be at least 1, not {value}")
    plan = StagesPlan(
        shapes=choose_shapes(parsed.shapes),
        lengths=tuple(parse_sizes("--lengths", parsed.lengths or (QUICK_LENGTHS if parsed.quick else LENGTHS))),
        block_size=parsed.block_size,
        rounds=rounds,
        max_bytes=max_bytes,
        num_threads=parsed.threads,
        seed=parsed.seed,
    )
    context: dict[str, Any] = {"machine": describe_machine(), **describe_run(list(argv), ("torch",))}
    with BenchProgress() as progress:
        result = StagesRun(plan, progress).run()
    write_results(plan, result, context, parsed)
    return 0


def write_results(plan: Any, result: Any, context: Mapping[str, Any], parsed: argparse.Namespace) -> None:
    """Tables, and files that were asked for."""
    from vllm_ascend_pd.bench.stages.report import build_document, print_document

    document = build_document(plan, result, context)
    print_document(document, make_console())
    if parsed.json is not None:
        write_json(parsed.json, document)
    if parsed.plot is not None:
        from vllm_ascend_pd.bench.stages.chart import draw

        draw(document, parsed.plot)
