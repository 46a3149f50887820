# SPDX-License-Identifier: Apache-2.0
"""Ours: all layers in one call (`vllm_ascend_pd.native.copying`); planes of unlike size are groups of their own.

Settings: in the caller's thread, or on copy threads beside it. The plan is part of what is timed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from vllm_ascend_pd.bench.stages.memory import Blocks, Cut
from vllm_ascend_pd.bench.stages.methods import EXTRACT, INJECT, PULL, Clock, Method, Puller, RatioMethod
from vllm_ascend_pd.native.copying import CopyGroup, CopyGroups, CopyPlan
from vllm_ascend_pd.native.pool import CopyPool

INLINE = "inline"


class Groups:
    """The groups of one direction: one by one for a plan, together for a call."""

    def __init__(self, groups: Sequence[CopyGroup]) -> None:
        self.each, self.together = groups, CopyGroups(groups)


class FusedCopies:
    """Extract, inject and straight copies of one cut."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = CopyPool(num_threads - 1) if num_threads > 1 else None
        self._is_inline = True

    def variants(self) -> list[str]:
        """Where the copy runs."""
        return [INLINE] + ([f"{self._num_threads} threads"] if self._pool else [])

    def bind(self, cut: Cut, variant: str) -> None:
        """One group per size of plane."""
        self._is_inline = variant == INLINE
        self._ordinals = array("q", range(cut.num_moved))
        pools = (cut.src, cut.num_blocks), (cut.dst, cut.num_blocks)
        self._extract = Groups(make_groups(cut, pools[0], (cut.send, cut.num_moved)))
        self._inject = Groups(make_groups(cut, (cut.receive, cut.num_moved), pools[1]))
        self._straight = Groups(make_groups(cut, *pools))

    def extract(self, blocks: Blocks) -> None:
        """Gather into the send buffer."""
        self._copy(self._extract, blocks.src, self._ordinals)

    def inject(self, blocks: Blocks) -> None:
        """Put into place from the receive buffer."""
        self._copy(self._inject, self._ordinals, blocks.dst)

    def straight(self, blocks: Blocks) -> None:
        """Paged to paged."""
        self._copy(self._straight, blocks.src, blocks.dst)

    def _copy(self, groups: Groups, src: array[int], dst: array[int]) -> None:
        if self._is_inline or self._pool is None:
            groups.together.copy(src, dst)
            return
        plan = CopyPlan()
        for group in groups.each:
            plan.add_group(group, src, dst)
        self._pool.submit(plan).wait()


def make_groups(cut: Cut, src: tuple[int, int], dst: tuple[int, int]) -> list[CopyGroup]:
    """`src`, `dst`: base and blocks per tensor. Planes of one size share a group."""
    planes_by_size: dict[int, list[int]] = {}
    for plane, size in enumerate(cut.plane_bytes):
        planes_by_size.setdefault(size, []).append(plane)
    groups = []
    for size, planes in planes_by_size.items():
        tensors = [array("Q") for _ in range(2)]
        for side, (base, num_blocks) in enumerate((src, dst)):
            columns = [cut.tensors(base, plane, num_blocks) for plane in planes]
            for layer in zip(*columns, strict=True):
                tensors[side].extend(layer)
        groups.append(CopyGroup(tensors[0], tensors[1], size))
    return groups


class Fused(Method):
    """extract writes the send buffer itself, so there is no scatter."""

    name, label = "fused", "fused (one call)"

    def __init__(self, num_threads: int) -> None:
        self._copies = FusedCopies(num_threads)
        self._puller = Puller(num_threads)

    def variants(self) -> list[str]:
        """Where the copy runs."""
        return self._copies.variants()

    def bind(self, cut: Cut, variant: str) -> None:
        """Groups."""
        self._copies.bind(cut, variant)
        self._puller.bind(cut)

    def run_stages(self, blocks: Blocks) -> dict[str, float]:
        """Each call returns when its bytes are there."""
        clock = Clock()
        self._copies.extract(blocks)
        clock.lap(EXTRACT)
        self._puller.run()
        clock.lap(PULL)
        self._copies.inject(blocks)
        clock.lap(INJECT)
        return clock.seconds

    def run_overall(self, blocks: Blocks) -> float:
        """The same calls."""
        start = time.perf_counter()
        self._copies.extract(blocks)
        self._puller.run()
        self._copies.inject(blocks)
        return time.perf_counter() - start


class Staged(RatioMethod):
    """Extract and inject, nothing between."""

    name, label = "staged", "ours, staged (extract + inject)"

    def __init__(self, num_threads: int) -> None:
        self._copies = FusedCopies(num_threads)

    def variants(self) -> list[str]:
        """Where the copy runs."""
        return self._copies.variants()

    def bind(self, cut: Cut, variant: str) -> None:
        """Groups."""
        self._copies.bind(cut, variant)

    def run(self, blocks: Blocks) -> float:
        """Two calls."""
        start = time.perf_counter()
        self._copies.extract(blocks)
        self._copies.inject(blocks)
        return time.perf_counter() - start


class Straight(Staged):
    """One copy, paged to paged."""

    name, label = "straight", "ours, straight (one copy)"

    def run(self, blocks: Blocks) -> float:
        """One call."""
        start = time.perf_counter()
        self._copies.straight(blocks)
        return time.perf_counter() - start
