# SPDX-License-Identifier: Apache-2.0
"""`vllm pd bench transfer`: arguments into a plan, a run, a table and files."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.arguments import add_output_arguments, parse_sizes
from vllm_ascend_pd.bench.machine import count_cpus, describe_machine, describe_run, read_cache_bytes
from vllm_ascend_pd.bench.output import check_outputs, make_console, write_json
from vllm_ascend_pd.bench.progress import BenchProgress
from vllm_ascend_pd.bench.ratios import format_bytes
from vllm_ascend_pd.bench.transfer.geometry import Geometry
from vllm_ascend_pd.bench.transfer.report import build_document, print_document
from vllm_ascend_pd.bench.transfer.run import TransferPlan, TransferRun
from vllm_ascend_pd.bench.transfer.specs import SPECS, Spec
from vllm_ascend_pd.errors import PDConfigError, nearest
from vllm_ascend_pd.memory.available import read_available_memory

MIB: Final = 1 << 20
PIECES: Final = "2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,2M"
QUICK_PIECES: Final = "4K,32K"
ROUNDS, QUICK_ROUNDS = 7, 3
PAYLOAD_MIB, POOL_MIB = 64, 512
TENSORS: Final = 64  # 32 layers of K and V
_SPARE_SHARE: Final = 0.75  # of the available memory, for all pools together


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    names = ", ".join(spec.name for spec in SPECS)
    parser.add_argument(
        "--pieces",
        metavar="SIZES",
        help=f"piece sizes, for example 4K,32K,2M (default: {PIECES}; --quick: {QUICK_PIECES})",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"rounds that count (default: {ROUNDS}; --quick: {QUICK_ROUNDS})"
    )
    parser.add_argument(
        "--contenders", metavar="NAMES", help=f"only these, separated by commas (default: all of {names})"
    )
    parser.add_argument(
        "--peers-python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter of the environment in which the peers are installed (default: this one)",
    )
    parser.add_argument(
        "--payload-mib", type=int, default=PAYLOAD_MIB, metavar="N", help="of one pull (default: %(default)s)"
    )
    parser.add_argument(
        "--pool-mib",
        type=int,
        default=POOL_MIB,
        metavar="N",
        help="memory of each process, a multiple of the payload, much larger than the cache (default: %(default)s)",
    )
    parser.add_argument(
        "--tensors",
        type=int,
        default=TENSORS,
        metavar="N",
        help="a pool is cut into at most so many tensors, as layers x K and V are (default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        choices=("random", "sequential"),
        default="random",
        help="block ids of a pull: random places, or one run of neighbours, which may be merged (default: random)",
    )
    parser.add_argument(
        "--threads", type=int, default=count_cpus(), metavar="N", help="most for the copy limit (default: %(default)s)"
    )
    parser.add_argument(
        "--host-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of our host llm_datadist (pd.host.…) for both of its processes (default: none)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of places and order (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few pieces and rounds: a try, not a measurement")
    add_output_arguments(parser)


def choose_specs(names: str | None) -> tuple[Spec, ...]:
    """Raises PDConfigError."""
    if names is None:
        return SPECS
    known = {spec.name: spec for spec in SPECS}
    chosen = []
    for name in names.split(","):
        if name not in known:
            raise PDConfigError(f"--contenders: no contender {name!r}{nearest(name, known)}")
        chosen.append(known[name])
    return tuple(chosen)


def make_plan(parsed: argparse.Namespace) -> TransferPlan:
    """Raises PDConfigError."""
    geometry = Geometry(parsed.pool_mib * MIB, parsed.payload_mib * MIB, parsed.tensors, parsed.order)
    pieces = parse_sizes("--pieces", parsed.pieces or (QUICK_PIECES if parsed.quick else PIECES))
    geometry.check(pieces)
    rounds = parsed.rounds if parsed.rounds is not None else (QUICK_ROUNDS if parsed.quick else ROUNDS)
    for flag, value in (("--rounds", rounds), ("--threads", parsed.threads), ("--tensors", parsed.tensors)):
        if value < 1:
            raise PDConfigError(f"{flag} must be at least 1, not {value}")
    peers_python = shutil.which(parsed.peers_python)
    if peers_python is None:
        raise PDConfigError(f"--peers-python: {parsed.peers_python} is not an executable file")
    specs = choose_specs(parsed.contenders)
    _check_memory(specs, geometry)
    return TransferPlan(
        geometry=geometry,
        pieces=tuple(pieces),
        rounds=rounds,
        specs=specs,
        python=sys.executable,
        peers_python=os.path.abspath(peers_python),  # not resolved: a virtual environment is found by its link
        num_threads=parsed.threads,
        seed=parsed.seed,
        options={"ours": _parse_options(parsed.host_option)},
    )


def _parse_options(given: Sequence[str]) -> dict[str, str]:
    options = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key.startswith("pd."):
            raise PDConfigError(f"--host-option must be pd.…=VALUE, not {text!r}")
        options[key] = value
    return options


def _check_memory(specs: Sequence[Spec], geometry: Geometry) -> None:
    wanted = 2 * len(specs) * geometry.pool_bytes
    allowed = int(read_available_memory().num_bytes * _SPARE_SHARE)
    if wanted > allowed:
        raise PDConfigError(
            f"{len(specs)} contenders with two pools of {format_bytes(geometry.pool_bytes)} need "
            f"{format_bytes(wanted)}, {format_bytes(allowed)} may be used: lower --pool-mib or name --contenders"
        )


def warn_of_small_pools(geometry: Geometry, progress: BenchProgress) -> None:
    """Numbers out of the cache say nothing about KV caches."""
    cache = read_cache_bytes()
    if geometry.pool_bytes < 8 * cache or geometry.payload_bytes < cache:
        progress.say(
            f"warning: a pool of {format_bytes(geometry.pool_bytes)} and a payload of "
            f"{format_bytes(geometry.payload_bytes)} are small beside a cache of {format_bytes(cache)}"
        )


def run_transfer(parsed: argparse.Namespace, argv: Sequence[str]) -> int:
    """The command. 1 when somebody delivered wrong bytes, or ours did not run. Raises PDError."""
    check_outputs(parsed.json, parsed.plot)
    native.load_library()
    plan = make_plan(parsed)
    context: dict[str, Any] = {"machine": describe_machine(), **describe_run(list(argv), ("torch",))}
    with BenchProgress() as progress:
        warn_of_small_pools(plan.geometry, progress)
        result = TransferRun(plan, progress).run()
    document = build_document(plan, result, context)
    print_document(document, make_console())
    write_outputs(document, parsed)
    bad = [o for o in result.outcomes if o.state != "ran" and (not o.spec.is_peer or o.state == "wrong bytes")]
    return 1 if bad else 0


def write_outputs(document: Mapping[str, Any], parsed: argparse.Namespace) -> None:
    """Files that were asked for."""
    if parsed.json is not None:
        write_json(parsed.json, document)
    if parsed.plot is not None:
        from vllm_ascend_pd.bench.transfer.chart import draw

        draw(document, parsed.plot)
