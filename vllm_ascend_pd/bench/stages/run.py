# SPDX-License-Identifier: Apache-2.0
"""Drives `bench stages`: cases one after another, in each the methods in random order round by round. One thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from vllm_ascend_pd.bench.progress import BenchProgress
from vllm_ascend_pd.bench.ratios import choose_fastest, format_bytes
from vllm_ascend_pd.bench.stages.fused import Fused, Staged, Straight
from vllm_ascend_pd.bench.stages.memory import Blocks, Cut, Memory
from vllm_ascend_pd.bench.stages.methods import Limit, Method, RatioMethod
from vllm_ascend_pd.bench.stages.per_layer import PerLayer, PerLayerDirect, PerLayerField, PerLayerWide
from vllm_ascend_pd.bench.stages.shapes import KVShape

TUNE_RUNS: Final = 3
REPEATS_OF_ONE_BLOCK: Final = 15  # per round: such a copy takes microseconds
WARM_UP_BYTES: Final = 256 << 20  # larger passes need no run that is thrown away
LARGE_BYTES: Final = 64 << 20
ONE_BLOCK, ONE_BLOCK_COLD, LARGE = "1_block", "1_block_cold", "64_mib"
AnyMethod = TypeVar("AnyMethod", Method, RatioMethod)


@dataclass(frozen=True)
class StagesPlan:
    """What to measure."""

    shapes: tuple[KVShape, ...]
    lengths: tuple[int, ...]
    block_size: int
    rounds: int
    max_bytes: int
    num_threads: int
    seed: int = 1


@dataclass(frozen=True)
class Sample:
    """One run of one method."""

    case: str  # "tokens" of the chart, or a ratio case
    shape: str
    num_tokens: int
    method: str
    variant: str
    phase: str  # "tune" or "round"
    round: int
    seconds: float  # for the chart: without syncs
    stages: dict[str, float] | None = None  # with a sync after each


@dataclass
class Case:
    """What became of one case."""

    name: str
    shape: str
    num_tokens: int
    num_bytes: int
    num_passes: int = 1
    reason: str = ""  # why it was not run
    variants: dict[str, str] = field(default_factory=dict)  # method -> its best setting


@dataclass
class StagesResult:
    """Everything measured."""

    pool_bytes: int
    staging_bytes: int
    samples: list[Sample] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)


class StagesRun:
    """One run; `run` may be called once. Raises WrongBytesError."""

    def __init__(self, plan: StagesPlan, progress: BenchProgress) -> None:
        self._plan = plan
        self._progress = progress
        self._random = random.Random(plan.seed)
        self._memory = Memory(plan.max_bytes)
        self._result = StagesResult(self._memory.pool_bytes, self._memory.staging_bytes)

    def run(self) -> StagesResult:
        """Measure all cases."""
        plan = self._plan
        if self._memory.is_small:
            self._progress.say(
                f"warning: pools of {format_bytes(self._memory.pool_bytes)} may be found in the cache (--max-memory)"
            )
        self._progress.begin(len(plan.shapes) * (len(plan.lengths) + 3) * plan.rounds)
        for shape in plan.shapes:
            for name in (ONE_BLOCK, ONE_BLOCK_COLD, LARGE):
                self._run_ratio_case(shape, name)
            for length in plan.lengths:
                self._run_chart_case(shape, length)
        return self._result

    def _open_case(self, name: str, shape: KVShape, num_blocks: int, *, one_staging: bool) -> tuple[Case, list[Cut]]:
        block_bytes = self._plan.block_size * shape.token_bytes
        case = Case(name, shape.name, num_blocks * self._plan.block_size, num_blocks * block_bytes)
        self._result.cases.append(case)
        cuts = self._memory.cut(shape, self._plan.block_size, num_blocks, one_staging=one_staging)
        if isinstance(cuts, str):
            case.num_passes, case.reason = 0, cuts
            self._progress.say(f"{shape.label}, {case.num_tokens} tokens: not run: {cuts}")
            return case, []
        case.num_passes = len(cuts)
        return case, cuts

    # ---- ratio cases

    def _run_ratio_case(self, shape: KVShape, name: str) -> None:
        large = -(-LARGE_BYTES // (self._plan.block_size * shape.token_bytes))
        case, cuts = self._open_case(name, shape, large if name == LARGE else 1, one_staging=True)
        if not cuts:
            return
        count = self._plan.num_threads
        kinds: list[Callable[[int], RatioMethod]] = [
            PerLayerDirect,
            PerLayerWide,
            PerLayerField,
            Staged,
            Straight,
            Limit,
        ]
        methods = [kind(count) for kind in kinds]
        fixed = [cut.draw(self._random) for cut in cuts] if name == ONE_BLOCK else None
        for method in methods:
            self._choose(case, method, partial(self._try_once, method, cuts, fixed))
        for number in range(self._plan.rounds):
            self._progress.step(f"round {number + 1}: {shape.label}, {name.replace('_', ' ')}")
            for method in self._shuffle(methods):
                variant = case.variants[method.name]
                for seconds in self._take_turn(method, cuts, variant, fixed, name != LARGE):
                    self._add(case, method.name, variant, "round", number, seconds)

    def _choose(self, case: Case, method: Method | RatioMethod, run: Callable[[str], float]) -> None:
        """The best setting; tried on the first pass, settings take turns here as well."""
        times = []
        for number in range(TUNE_RUNS + 1):
            for variant in method.variants():
                seconds = run(variant)
                self._add(case, method.name, variant, "tune", number, seconds)
                times += [(variant, seconds)] if number else []
        case.variants[method.name] = choose_fastest(times)

    def _try_once(
        self, method: RatioMethod, cuts: Sequence[Cut], fixed: Sequence[Blocks] | None, variant: str
    ) -> float:
        method.bind(cuts[0], variant)
        blocks = fixed[0] if fixed else cuts[0].draw(self._random)
        if fixed:
            method.run(blocks)  # to have it in the cache
        seconds = method.run(blocks)
        cuts[0].verify(blocks)
        return seconds

    def _take_turn(
        self, method: RatioMethod, cuts: Sequence[Cut], variant: str, fixed: Sequence[Blocks] | None, is_short: bool
    ) -> list[float]:
        totals = [0.0] * (REPEATS_OF_ONE_BLOCK if is_short else 1)
        for index, cut in enumerate(cuts):
            method.bind(cut, variant)
            blocks = fixed[index] if fixed else cut.draw(self._random)
            method.run(blocks)
            cut.verify(blocks)
            if fixed:
                method.run(blocks)  # the check has emptied the cache of it
            for repeat in range(len(totals)):
                blocks = fixed[index] if fixed else cut.draw(self._random)
                totals[repeat] += method.run(blocks)
                if not fixed:
                    cut.verify(blocks)
            if fixed:
                cut.verify(blocks)
        return totals

    # ---- the chart

    def _run_chart_case(self, shape: KVShape, length: int) -> None:
        case, cuts = self._open_case("tokens", shape, -(-length // self._plan.block_size), one_staging=False)
        if not cuts:
            return
        methods: list[Method] = [PerLayer(self._plan.num_threads), Fused(self._plan.num_threads)]
        for method in methods:
            self._choose(case, method, partial(self._overall, method, cuts[:1]))
        for number in range(self._plan.rounds):
            self._progress.step(f"round {number + 1}: {shape.label}, {length} tokens")
            for method in self._shuffle(methods):
                variant = case.variants[method.name]
                seconds = self._overall(method, cuts, variant)
                stages = self._stages(method, cuts, variant)
                self._add(case, method.name, variant, "round", number, seconds, stages)

    def _overall(self, method: Method, cuts: Sequence[Cut], variant: str) -> float:
        total = 0.0
        for cut in cuts:
            method.bind(cut, variant)
            if cut.num_bytes <= WARM_UP_BYTES:
                method.run_overall(cut.draw(self._random))
            blocks = cut.draw(self._random)
            total += method.run_overall(blocks)
            cut.verify(blocks)
        return total

    def _stages(self, method: Method, cuts: Sequence[Cut], variant: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for cut in cuts:
            method.bind(cut, variant)
            blocks = cut.draw(self._random)
            for stage, seconds in method.run_stages(blocks).items():
                totals[stage] = totals.get(stage, 0.0) + seconds
            cut.verify(blocks)
        return totals

    def _shuffle(self, methods: Sequence[AnyMethod]) -> list[AnyMethod]:
        return self._random.sample(list(methods), len(methods))

    def _add(
        self,
        case: Case,
        method: str,
        variant: str,
        phase: str,
        number: int,
        seconds: float,
        stages: dict[str, float] | None = None,
    ) -> None:
        self._result.samples.append(
            Sample(case.name, case.shape, case.num_tokens, method, variant, phase, number, seconds, stages)
        )
