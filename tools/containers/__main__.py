# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.containers test`: build the Dockerfile's targets in clean roots without Docker, and try them.

Prints what was done and how long it took, as `docs/containers.md` records it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.cache import CacheError
from tools.containers import checks, dockerfile, images, pair, roots
from tools.containers.images import Builder, Image, Site
from tools.fork.lanes import get_lane
from vllm_ascend_pd.signals import sigterm_as_interrupt

TARGETS = ("cpu", "a2", "a3")


def build_parser() -> argparse.ArgumentParser:
    """One verb and its flags."""
    parser = argparse.ArgumentParser(prog="python -m tools.containers", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("test", help="build and try")
    verb.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET", help="cpu, a2, a3 (default: all)")
    verb.add_argument("--serve", type=Path, metavar="MODEL", help="also serve this model from a pair of cpu containers")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a step or a check failed."""
    arguments = build_parser().parse_args(argv)
    started = time.monotonic()
    try:
        roots.require_machine()
        failed = 0
        with sigterm_as_interrupt():  # containers and networks are taken away on the way out
            for target in arguments.targets:
                failed += test_cpu(arguments.serve) if target == "cpu" else test_ascend(target)
    except CacheError as error:
        print(f"container-test: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("container-test: stopped", file=sys.stderr)
        return 130
    images.prune_layers()
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    print(f"[containers] {day}: {failed} failed, {time.monotonic() - started:.0f} s, {os.cpu_count()} cores")
    return 1 if failed else 0


def test_cpu(model: Path | None) -> int:
    """The cpu target, whole. Returns the number of failed checks."""
    builder = new_builder()
    image = builder.build("cpu")
    report_steps("cpu", builder, image)
    listed = list(checks.iter_checks(image, get_lane("cpu").release))
    if model is not None:
        folder = model.resolve()
        listed.append(("a pair of containers serves a model", lambda: pair.check_pair(image, folder)))
    failed = 0
    for title, check in listed:
        begun = time.monotonic()
        try:
            seen = check()
            print(f"[containers] ok    {title}: {seen} ({time.monotonic() - begun:.0f} s)", flush=True)
        except CacheError as error:
            failed += 1
            print(f"[containers] FAIL  {title}: {error}", flush=True)
    return failed


def test_ascend(target: str) -> int:
    """The steps of an Ascend target that need no CANN, on Debian with a Python in place of the CANN image."""
    stages = dockerfile.read(images.ROOT / "Dockerfile")
    base = stages[target].base
    builder = new_builder(skip=checks.ASCEND_NOT_RUN)
    builder.bases = {**builder.bases, base: builder.build("source")}  # it has Python, as CANN's image
    image = builder.build(target)
    report_steps(target, builder, image)
    print(f"[containers] instead of {base}: debian:bookworm-slim with Python; the wheel without what it needs")
    for text in builder.skipped:
        print(f"[containers] NOT RUN {text}")
    return 0


def new_builder(skip: tuple[str, ...] = ()) -> Builder:
    """Of this repository's Dockerfile."""
    base = Image((roots.get_base(),), roots.get_base().name)
    return Builder(
        dockerfile.read(images.ROOT / "Dockerfile"),
        Site.of_this_machine(),
        bases={"debian:bookworm-slim": base},
        skip=skip,
    )


def report_steps(target: str, builder: Builder, image: Image) -> None:
    """What was run, how long it took (nearly nothing: found again), and how large it is."""
    for text, seconds in builder.timings:
        print(f"[containers] {target}: {seconds:6.1f} s  RUN {text}", flush=True)
    for layer in image.layers:
        print(f"[containers] {target}: {measure(layer) / 1e6:8.0f} MB  {layer.parent.name[:12]}")
    print(f"[containers] {target}: {sum(map(measure, image.layers)) / 1e6:.0f} MB unpacked", flush=True)


def measure(folder: Path) -> int:
    """Bytes of the files under it, links not followed, hard links once."""
    seen: set[int] = set()
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            info = os.lstat(os.path.join(place, name))
            if info.st_ino not in seen:
                seen.add(info.st_ino)
                total += info.st_size
    return total


if __name__ == "__main__":
    sys.exit(main())
