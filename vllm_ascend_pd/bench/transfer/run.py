# SPDX-License-Identifier: Apache-2.0
"""Drives `bench transfer`: start everybody, search each one's best setting, then round by round in random order.

One thread. A contender that fails is dropped with its reason; the others go on.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd.bench.progress import BenchProgress
from vllm_ascend_pd.bench.ratios import choose_fastest, format_bytes
from vllm_ascend_pd.bench.transfer.children import PACKAGE, ChildError, Pair, Start
from vllm_ascend_pd.bench.transfer.geometry import Geometry
from vllm_ascend_pd.bench.transfer.specs import Spec

TUNE_PULLS: Final = 3  # of each variant, after one that is thrown away
IDLE_S: Final = 0.5


@dataclass(frozen=True)
class TransferPlan:
    """What to measure."""

    geometry: Geometry
    pieces: tuple[int, ...]
    rounds: int
    specs: tuple[Spec, ...]
    python: str
    peers_python: str
    num_threads: int
    seed: int = 1
    options: dict[str, dict[str, str]] = field(default_factory=dict)  # module of a contender -> its options


@dataclass(frozen=True)
class Sample:
    """One verified pull."""

    contender: str
    piece_bytes: int
    variant: str
    phase: str  # "tune": searching the best setting; "round": counts
    round: int
    seconds: float
    posting_seconds: float | None
    cpu_seconds: float


@dataclass
class Outcome:
    """What became of one contender."""

    spec: Spec
    state: str = "ran"  # or "not installed", "failed", "wrong bytes"
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    idle_cpu: float = 0.0
    variants: dict[int, str] = field(default_factory=dict)  # the best, by piece size


@dataclass
class TransferResult:
    """Everything measured."""

    samples: list[Sample] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


class TransferRun:
    """One run; `run` may be called once."""

    def __init__(self, plan: TransferPlan, progress: BenchProgress) -> None:
        self._plan = plan
        self._progress = progress
        self._result = TransferResult()
        self._outcomes = {spec.name: Outcome(spec) for spec in plan.specs}
        self._pairs: dict[str, Pair] = {}
        self._random = random.Random(plan.seed)

    def run(self) -> TransferResult:
        """Measure. Kills all children on the way out, whatever happens."""
        self._result.outcomes = list(self._outcomes.values())
        try:
            with make_import_folder() as folder:
                self._start_all(folder)
                self._tune_all()
                self._measure_all()
                self._check_all()
        finally:
            for pair in self._pairs.values():
                pair.end()
        return self._result

    def _start_all(self, folder: Path) -> None:
        plan = self._plan
        geometry = vars(plan.geometry)
        job = {
            "geometry": geometry,
            "pieces": plan.pieces,
            "options": plan.options,
            "num_threads": plan.num_threads,
        }
        start = Start(plan.python, plan.peers_python, folder, job)
        for spec in plan.specs:
            self._progress.say(f"starting {spec.label}")
            pair = self._pairs[spec.name] = Pair(spec)
            try:
                pair.start(start)
                pair.measure_idle(IDLE_S)
            except (ChildError, OSError) as error:
                self._drop(spec.name, error)
                continue
            outcome = self._outcomes[spec.name]
            outcome.facts, outcome.idle_cpu = pair.facts, pair.idle_cpu
            pair.rest()

    def _drop(self, name: str, error: Exception) -> None:
        outcome = self._outcomes[name]
        outcome.state = error.kind if isinstance(error, ChildError) else "failed"
        outcome.reason = str(error)
        self._pairs.pop(name).end()
        self._progress.say(f"{outcome.spec.label}: {outcome.state}: {outcome.reason}")

    def _tune_all(self) -> None:
        self._progress.begin(len(self._plan.pieces) * len(self._pairs))
        for piece in self._plan.pieces:
            for name in list(self._pairs):
                self._progress.step(f"best setting of {self._outcomes[name].spec.label}, {format_bytes(piece)}")
                try:
                    self._tune(name, piece)
                except ChildError as error:
                    self._drop(name, error)

    def _tune(self, name: str, piece: int) -> None:
        pair = self._pairs[name]
        pair.resume()
        variants: Sequence[str] = pair.reader.call("variants", piece=piece)
        times: list[tuple[str, float]] = []
        if len(variants) > 1:
            for pull in range(TUNE_PULLS + 1):  # variants take turns here as well
                for variant in variants:
                    sample = self._pull(name, piece, variant, "tune", pull)
                    times += [(variant, sample.seconds)] if pull else []
        self._outcomes[name].variants[piece] = choose_fastest(times) if times else variants[0]
        pair.rest()

    def _measure_all(self) -> None:
        self._progress.begin(self._plan.rounds * len(self._plan.pieces) * len(self._pairs))
        for number in range(self._plan.rounds):
            for piece in self._plan.pieces:
                names = list(self._pairs)
                self._random.shuffle(names)
                for name in names:
                    label = self._outcomes[name].spec.label
                    self._progress.step(f"round {number + 1}: {label}, {format_bytes(piece)}")
                    try:
                        self._take_turn(name, piece, number)
                    except ChildError as error:
                        self._drop(name, error)

    def _take_turn(self, name: str, piece: int, number: int) -> None:
        pair, variant = self._pairs[name], self._outcomes[name].variants[piece]
        pair.resume()
        pair.pull(piece, self._next_seed(), variant)  # back from its rest: not counted
        self._pull(name, piece, variant, "round", number)
        pair.rest()

    def _pull(self, name: str, piece: int, variant: str, phase: str, number: int) -> Sample:
        timing = self._pairs[name].pull(piece, self._next_seed(), variant)
        sample = Sample(name, piece, variant, phase, number, **timing)
        self._result.samples.append(sample)
        return sample

    def _next_seed(self) -> int:
        return self._random.randrange(1 << 48)

    def _check_all(self) -> None:
        for name in list(self._pairs):
            self._pairs[name].resume()
            try:
                self._pairs[name].reader.call("check_untouched")
            except ChildError as error:
                self._drop(name, error)


@contextmanager
def make_import_folder() -> Iterator[Path]:
    """A folder that holds our package and nothing else, for the peers' interpreter."""
    with tempfile.TemporaryDirectory(prefix="pd-bench-") as folder:
        (Path(folder) / PACKAGE.name).symlink_to(PACKAGE)
        yield Path(folder)
