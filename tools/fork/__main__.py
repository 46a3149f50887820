# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.fork VERB`: the command line; each verb is one function of another module."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cache import CacheError
from tools.fork.errors import ForkError


def build_parser() -> argparse.ArgumentParser:
    """The verbs and their flags."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fork",
        description="Keep and build the fork: vLLM as released, plus the delta in vllm/.",
        epilog="Artefacts lie in $VLLM_PD_CACHE (default ~/.cache/vllm-ascend-pd). Exit code 1: failed.",
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--index-url", metavar="URL", help="package index (default: $PIP_INDEX_URL, else PyPI)")
    shared.add_argument("--offline", action="store_true", help="use the cache only, never the network")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--lane", metavar="LANE", help="lane of vllm/UPSTREAM.toml (default: cpu)")
    one.add_argument("--release", metavar="X", help="an upstream release instead of a lane")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("fetch", parents=[shared], help="bring the lanes' artefacts into the cache")
    verb.add_argument("--lane", metavar="LANE", help="only this lane (default: all)")
    verb.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="copy from a folder, no network")
    verb.set_defaults(run=run_fetch)
    verb = verbs.add_parser("apply", parents=[shared, one], help="write the patched tree as a git repository")
    verb.add_argument("--out", type=Path, metavar="DIR", help="default: build/fork/<lane>")
    verb.set_defaults(run=run_apply)
    verb = verbs.add_parser("diff", parents=[shared, one], help="print all edits as one unified diff")
    verb.add_argument("-U", "--unified", type=int, default=3, metavar="N", help="lines of context (default: 3)")
    verb.set_defaults(run=run_diff)
    verb = verbs.add_parser("check", parents=[shared], help="do all edits apply to all lanes?")
    verb.add_argument("--lane", action="append", metavar="LANE", help="only this lane; may be repeated")
    verb.add_argument("--release", action="append", default=[], metavar="X", help="also this upstream release")
    verb.set_defaults(run=run_check)
    verb = verbs.add_parser("bump", parents=[shared], help="what a bump of a lane to a release needs; changes nothing")
    verb.add_argument("--release", required=True, metavar="X", help="upstream's release")
    verb.add_argument("--lane", default="cpu", metavar="LANE", help="lane to bump (default: cpu)")
    verb.set_defaults(run=run_bump)
    verb = verbs.add_parser("list", help="why each edit exists and when it may be dropped")
    verb.set_defaults(run=run_list)
    verb = verbs.add_parser("wheel", parents=[shared], help="build the fork's wheel")
    verb.add_argument("--lane", default="cpu", metavar="LANE", help="lane of vllm/UPSTREAM.toml (default: cpu)")
    verb.add_argument("--arch", default=platform.machine(), metavar="ARCH", help="machine (default: this one's)")
    verb.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="default: dist")
    verb.set_defaults(run=run_wheel)
    _add_overlay(verbs.add_parser("overlay", help="development aid: the delta in place over an installed vLLM"))
    return parser


def _add_overlay(verb: argparse.ArgumentParser) -> None:
    verb.description = (
        "Development aid, not the way to install: applies all current edits in place over the vLLM in "
        "SITE_PACKAGES and links our new modules and vllm_ascend_pd there. Originals are kept in "
        "vllm/.pd-pristine/, and each run starts from them, so run it again after every change."
    )
    verb.add_argument("--site", type=Path, required=True, metavar="SITE_PACKAGES")
    verb.add_argument("--remove", action="store_true", help="put upstream's files back and stop")
    verb.add_argument("--keep-going", action="store_true", help="leave out edits that do not apply")
    verb.set_defaults(run=run_overlay)


def run_fetch(args: argparse.Namespace) -> int:
    """The verb `fetch`."""
    from tools.fork.cache import adopt, require
    from tools.fork.index import Index
    from tools.fork.lanes import get_lane, load_lanes

    index = None if args.offline else Index(args.index_url)
    for lane in [get_lane(args.lane)] if args.lane else load_lanes().values():
        artefact = lane.readable_artefact()
        if args.folder is not None:
            adopt(artefact, args.folder)
        print(f"{lane.name}: {require(artefact, index)}")
    return 0


def run_apply(args: argparse.Namespace) -> int:
    """The verb `apply`."""
    from tools.fork.releases import choose
    from tools.fork.tree import materialise

    target, index = choose(args.lane, args.release, args.index_url, offline=args.offline)
    out: Path = args.out or Path("build") / "fork" / target.name
    done = materialise(target.open(index), out)
    print(f"{out}: vLLM {target.release} with {len(done.steps)} edit files; read it with git -C {out} log --stat")
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """The verb `diff`."""
    from tools.fork.releases import choose
    from tools.fork.tree import diff_lines

    target, index = choose(args.lane, args.release, args.index_url, offline=args.offline)
    sys.stdout.writelines(diff_lines(target.open(index), num_context=args.unified))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """The verb `check`."""
    from tools.fork.check import check, table
    from tools.fork.delta import load_edits
    from tools.fork.index import Index
    from tools.fork.lanes import get_lane, load_lanes
    from tools.fork.releases import target_of_lane, target_of_release

    index = None if args.offline else Index(args.index_url)
    lanes = [get_lane(name) for name in args.lane] if args.lane else list(load_lanes().values())
    targets = [target_of_lane(lane) for lane in lanes]
    targets += [target_of_release(release, index) for release in args.release]
    columns = check(targets, index)
    print(table(columns, load_edits()))
    return 1 if any(column.problems for column in columns) else 0


def run_bump(args: argparse.Namespace) -> int:
    """The verb `bump`."""
    from tools.fork.bump import report
    from tools.fork.index import Index
    from tools.fork.lanes import get_lane

    text, ready = report(get_lane(args.lane), args.release, None if args.offline else Index(args.index_url))
    print(text)
    return 0 if ready else 1


def run_list(args: argparse.Namespace) -> int:
    """The verb `list`."""
    from tools.fork.check import list_text
    from tools.fork.delta import load_edits

    print(list_text(load_edits()))
    return 0


def run_wheel(args: argparse.Namespace) -> int:
    """The verb `wheel`."""
    from tools.fork.cache import require
    from tools.fork.index import Index
    from tools.fork.lanes import get_lane
    from tools.fork.wheel import build_lane
    from tools.native.building import build

    lane = get_lane(args.lane)
    artefact = lane.artefact(args.arch)
    index = None if args.offline else Index(args.index_url)
    upstream = require(artefact, index)
    libraries = {name: path.read_bytes() for name, path in build(args.arch).items()}
    print(build_lane(lane, upstream, args.arch, args.out, libraries))
    return 0


def run_overlay(args: argparse.Namespace) -> int:
    """The verb `overlay`."""
    from tools.fork.overlay import overlay
    from tools.native.building import build, install

    if not args.remove:
        install(build())  # the package is linked, so it finds the library in the checkout
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
    except (CacheError, subprocess.CalledProcessError) as error:  # of the native build
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` closed it
        sys.stderr.close()
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
