# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.native VERB...`: the command line; each verb is one function of another module."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from tools.cache import CacheError


def run_build(args: argparse.Namespace) -> bool:
    """The verb `build`."""
    from tools.native.building import build, install

    machine = args.arch or platform.machine()
    libraries = build(machine)
    if machine == platform.machine():
        install(libraries)
    for path in libraries.values():
        print(f"[native] {machine}: {path}")
    return True


def run_test(args: argparse.Namespace) -> bool:
    """The verb `test`."""
    from tools.native.testing import check_product

    return check_product(platform.machine(), args.only)


def run_sanitize(args: argparse.Namespace) -> bool:
    """The verb `sanitize`."""
    from tools.native.testing import check_sanitized

    return all([check_sanitized(kind, args.only) for kind in ("address", "thread")])


def run_tidy(args: argparse.Namespace) -> bool:
    """The verb `tidy`."""
    from tools.native.tidy import tidy

    return tidy(args.only)


def run_aarch64(args: argparse.Namespace) -> bool:
    """The verb `aarch64`."""
    from tools.native.testing import check_product

    return check_product("aarch64", args.only)


def run_audit(_: argparse.Namespace) -> bool:
    """The verb `audit`."""
    from tools.native.audit import audit

    return audit()


VERBS: Final[dict[str, Callable[[argparse.Namespace], bool]]] = {
    "build": run_build,
    "test": run_test,
    "sanitize": run_sanitize,
    "tidy": run_tidy,
    "aarch64": run_aarch64,
    "audit": run_audit,
}


def build_parser() -> argparse.ArgumentParser:
    """The verbs and their flags."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.native",
        description="Build, test and examine the C++ of csrc_npu. Verbs run in the order given; all run, then one "
        "that failed makes the exit code 1.",
        epilog="build: the libraries into vllm_ascend_pd/native; test: tests/csrc as built for the product; "
        "sanitize: the same with ASan + UBSan and with TSan (system g++); tidy: clang-tidy; aarch64: cross-built, the "
        "tests under qemu-user; audit: auditwheel and the glibc that the libraries need.",
    )
    parser.add_argument("verbs", nargs="+", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), help="build: for this machine, into the cache only")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="tests or files with this in the name"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verbs; what a person can act on is one message without a traceback."""
    args = build_parser().parse_args(argv)
    failed = []
    for verb in args.verbs:
        started = time.monotonic()
        try:
            is_good = VERBS[verb](args)
        except (CacheError, OSError) as error:
            print(f"error: {verb}: {error}", file=sys.stderr)
            is_good = False
        except subprocess.CalledProcessError as error:
            print(
                f"error: {verb}: exit code {error.returncode} of {' '.join(map(str, error.cmd[:4]))} ...",
                file=sys.stderr,
            )
            is_good = False
        print(f"[native] {verb}: {'done' if is_good else 'FAILED'} in {time.monotonic() - started:.1f} s", flush=True)
        failed += [] if is_good else [verb]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
