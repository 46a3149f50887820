# SPDX-License-Identifier: Apache-2.0
"""What a method of moving KV does, and the parts that all of them share. One thread calls it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Final

from vllm_ascend_pd.bench import native
from vllm_ascend_pd.bench.stages.memory import Blocks, Cut
from vllm_ascend_pd.native.copying import CopyPlan
from vllm_ascend_pd.native.pool import CopyPool

EXTRACT, SCATTER, PULL, INJECT = "extract", "scatter", "pull", "inject"
STAGES: Final = (EXTRACT, SCATTER, PULL, INJECT)
SAVE: Final = (EXTRACT, SCATTER)


class Method(ABC):
    """`variants` are its settings; the best is chosen by measuring. `bind` comes before everything else."""

    name: str
    label: str

    @abstractmethod
    def variants(self) -> list[str]:
        """Settings to choose from."""

    @abstractmethod
    def bind(self, cut: Cut, variant: str) -> None:
        """Prepare for a cut: what an engine does once, at start."""

    @abstractmethod
    def run_stages(self, blocks: Blocks) -> dict[str, float]:
        """Save and load with a sync after each stage; seconds by stage."""

    @abstractmethod
    def run_overall(self, blocks: Blocks) -> float:
        """The same without the syncs; seconds."""


class RatioMethod(ABC):
    """One operation of the ratio cases: paged to paged, through staging or not."""

    name: str
    label: str

    @abstractmethod
    def variants(self) -> list[str]:
        """Settings to choose from."""

    @abstractmethod
    def bind(self, cut: Cut, variant: str) -> None:
        """Prepare for a cut."""

    @abstractmethod
    def run(self, blocks: Blocks) -> float:
        """Seconds."""


class Puller:
    """The pull of the chart: the send buffer copied to the receive buffer by our engine, for every method alike."""

    def __init__(self, num_threads: int) -> None:
        self._pool = CopyPool(max(0, num_threads - 1))

    def bind(self, cut: Cut) -> None:
        """One contiguous copy."""
        self._plan = CopyPlan()
        self._plan.add([cut.send], [cut.receive], [0], [0], cut.num_bytes)

    def run(self) -> None:
        """Blocks until it is done."""
        self._pool.submit(self._plan).wait()


class Limit(RatioMethod):
    """The same pieces by libpd_bench, straight: the copy limit."""

    name, label = "limit", "copy limit, straight"

    def __init__(self, num_threads: int) -> None:
        self._teams = {count: native.Team(count) for count in range(1, num_threads + 1)}
        self._kernels = native.kernel_names()

    def variants(self) -> list[str]:
        """Every kernel with every thread count."""
        return [f"{kernel} x{count}" for kernel in self._kernels for count in self._teams]

    def bind(self, cut: Cut, variant: str) -> None:
        """Choose."""
        kernel, _, count = variant.rpartition(" x")
        self._cut, self._kernel, self._team = cut, self._kernels.index(kernel), self._teams[int(count)]

    def run(self, blocks: Blocks) -> float:
        """Timed inside the library, plane by plane."""
        seconds = 0.0
        for plane, size in enumerate(self._cut.plane_bytes):
            sources = self._cut.pieces(self._cut.src, plane, blocks.src)
            targets = self._cut.pieces(self._cut.dst, plane, blocks.dst)
            seconds += self._team.copy(self._kernel, size, targets, sources)
        return seconds


class Clock:
    """Adds up the time of stages."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to `stage`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now
