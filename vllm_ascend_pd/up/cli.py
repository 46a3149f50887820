# SPDX-License-Identifier: Apache-2.0
"""The command line of `vllm pd`: parse, run, turn errors into a message and an exit code.

`vllm` hands over everything after `vllm pd`, before it loads its other subcommands (`main.edit.py`). Parsing is
done here and not by vLLM's parser, because everything after `--` belongs to `vllm serve` and must arrive there as it
was written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.secret import SECRET_FLAG
from vllm_ascend_pd.signals import sigterm_as_interrupt
from vllm_ascend_pd.up.drain import DrainOptions, drain
from vllm_ascend_pd.up.machine import prepare_machine
from vllm_ascend_pd.up.plan import UpOptions, plan_deployment
from vllm_ascend_pd.up.report import StartProgress, print_endpoints
from vllm_ascend_pd.up.status import show_status
from vllm_ascend_pd.up.supervise import Supervisor

# Verbs with a parser of their own: module with `main(arguments) -> int`, line of help.
_OWN_PARSERS = {
    "bench": ("vllm_ascend_pd.bench.cli", "measure how KV moves: `bench transfer`, `bench stages`"),
    "doctor": ("vllm_ascend_pd.doctor.cli", "check this host, and the way to a peer; say what to do"),
    "ranktable": ("vllm_ascend_pd.ascend.ranktable.cli", "rank tables of Ascend hosts: generate, check, show"),
}

START_TIMEOUT_S = 900.0  # a large model on a slow disk; `--start-timeout`


def build_parser() -> argparse.ArgumentParser:
    """All verbs of `vllm pd`."""
    parser = argparse.ArgumentParser(prog="vllm pd", description="Prefill/decode disaggregation.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser(
        "up",
        help="start a whole deployment on this machine and supervise it",
        description="Start prefill and decode instances of one model on this machine, on free ports of the "
        "loopback interface with a secret of their own; print the endpoints; stop all on Ctrl-C.",
        usage="vllm pd up MODEL [--prefill N] [--decode N] [options] [-- arguments of vllm serve]",
    )
    up.add_argument("model", metavar="MODEL", help="what `vllm serve` takes: a folder, or a model's name")
    up.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill instances (default: 1)")
    up.add_argument("--decode", type=int, default=1, metavar="N", help="decode instances (default: 1)")
    up.add_argument(
        "--port-base",
        type=int,
        metavar="PORT",
        help="first HTTP port; instances take this and the next ones, prefill first (default: free ports)",
    )
    up.add_argument(
        "--host-transport",
        choices=("auto", "mapped", "tcp"),
        default="auto",
        help="how KV moves between the instances: mapped memory or TCP (default: auto)",
    )
    up.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="one log per instance goes here (default: a new folder)"
    )
    up.add_argument(
        "--start-timeout",
        type=float,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help=f"give up when not all are healthy by then (default: {START_TIMEOUT_S:.0f})",
    )
    status = verbs.add_parser("status", help="show links, leases, transfers and totals of one instance")
    status.add_argument("url", metavar="URL", help="its HTTP address, for example http://127.0.0.1:8000")
    status.add_argument("--json", action="store_true", help="print /pd/status as it came")
    _add_drain(verbs)
    for verb, (_, text) in _OWN_PARSERS.items():
        verbs.add_parser(verb, help=text, add_help=False)
    return parser


def _add_drain(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    drain_verb = verbs.add_parser(
        "drain",
        help="have one instance take no new requests, and wait until it has none left",
        description="Have one instance refuse new requests (HTTP 503, pd_draining; decode instances ask another "
        "prefill instance) and wait until its requests have ended and its leases are released. It keeps running.",
    )
    drain_verb.add_argument("url", metavar="URL", help="its HTTP address, for example http://127.0.0.1:8000")
    drain_verb.add_argument(
        SECRET_FLAG,
        metavar="FILE",
        help="the deployment's secret, as for `vllm serve` [env: VLLM_PD_SECRET_FILE] (default: the user's own secret)",
    )
    drain_verb.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait; exit code 1 when something is left then; 0: do not wait (default: 60)",
    )
    drain_verb.add_argument("--undo", action="store_true", help="take requests again")


def run_pd_command(argv: Sequence[str]) -> None:
    """Exit with the result when the command line is `vllm pd …`; return when it is anything else."""
    if argv[1:2] == ["pd"]:
        sys.exit(main(argv[2:]))


def split_serve_args(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """(ours, those of `vllm serve`): what stands before and after the first `--`."""
    words = list(arguments)
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def main(arguments: Sequence[str]) -> int:
    """Run one verb; the exit code is 0 after Ctrl-C, 1 for a failure, 2 for a wrong command line."""
    if arguments and arguments[0] in _OWN_PARSERS:
        module = importlib.import_module(_OWN_PARSERS[arguments[0]][0])  # imported only where it is asked for
        code: int = module.main(arguments[1:])
        return code
    ours, serve_args = split_serve_args(arguments)
    parser = build_parser()
    parsed = parser.parse_args(ours)
    if serve_args and parsed.verb != "up":
        parser.error(f"{parsed.verb} takes no arguments after `--`: {' '.join(serve_args)}")
    try:
        if parsed.verb == "status":
            return show_status(parsed.url, as_json=parsed.json)
        if parsed.verb == "drain":
            secret_file = parsed.pd_secret_file or os.environ.get("VLLM_PD_SECRET_FILE")
            return drain(DrainOptions(parsed.url, secret_file, parsed.timeout, parsed.undo))
        return run_up(parsed, serve_args)
    except PDError as error:
        print(f"vllm pd {parsed.verb}: {error}", file=sys.stderr)
        return 1


def run_up(parsed: argparse.Namespace, serve_args: tuple[str, ...]) -> int:
    """Start, announce, watch; leaves nothing behind."""
    options = UpOptions(
        model=parsed.model,
        num_prefill=parsed.prefill,
        num_decode=parsed.decode,
        host_transport=parsed.host_transport,
        serve_args=serve_args,
    )
    with prepare_machine(options, port_base=parsed.port_base, log_dir=parsed.log_dir) as machine:
        deployment = plan_deployment(options, machine)
        progress = StartProgress()
        try:
            with sigterm_as_interrupt(), Supervisor(deployment, progress) as supervisor:
                supervisor.start()
                supervisor.wait_ready(parsed.start_timeout)
                print_endpoints(deployment, Console())
                supervisor.watch()
        except KeyboardInterrupt:
            return 0
        finally:
            progress.close()
    return 0
