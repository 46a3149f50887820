# SPDX-License-Identifier: Apache-2.0
"""The bytes of one rank's part of a transfer: straight, slice by slice, or staged. Runs in the pull threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.plan.layout import CacheLayout
from vllm_ascend_pd.transfer.choice import WayChooser
from vllm_ascend_pd.transfer.staging.chunks import cut

# One call moves at most this much, so that a deadline or a shutdown is seen between calls.
SLICE_BYTES = 256 << 20


class PullFailedError(PDError):
    """This rank's part failed; the reason goes to the API server's policy."""


@dataclass
class Moved:
    """What one rank moved, in how many calls and pieces, and the seconds per stage."""

    num_bytes: int = 0
    num_pieces: int = 0  # of a straight pull: consecutive blocks of a layer are one
    num_calls: int = 0
    staged: bool = False
    link_s: float = 0.0
    extract_s: float = 0.0
    pull_s: float = 0.0
    inject_s: float = 0.0


@dataclass
class Caches:
    """This rank's registered caches, and the datadist that they are registered with."""

    layout: CacheLayout
    group_layers: Sequence[Sequence[str]]
    caches: Sequence[Any]  # datadist Cache per model_id
    manager: Any  # datadist CacheManager
    module: Any  # the datadist implementation's names


def move(caches: Caches, ways: WayChooser, pulls: Sequence[GroupPull], cluster_id: int, deadline: float) -> Moved:
    """Everything the pulls name, from that rank.

    Raises:
        PlanError: a pull of nothing, or of the null block.
        PullFailedError, StagingError: out of time, or the other side's staging refused.
        PDUnreachableError: the other side's staging did not answer.
        LLMException: of the data plane.
    """
    for pull in pulls:
        pull.check()
    moved = measure(caches, pulls)
    client = ways.choose(cluster_id, moved.num_bytes, moved.num_pieces)
    if client is None:
        started = time.monotonic()
        _pull_straight(caches, pulls, cluster_id, deadline, moved)
        moved.pull_s = time.monotonic() - started
        return moved
    assert ways.staged is not None
    chunks = cut(pulls, caches.layout, caches.group_layers)
    times = ways.staged.pull(chunks, client, cluster_id, deadline)
    moved.staged, moved.num_calls, moved.num_pieces = True, len(chunks), len(chunks)
    moved.extract_s, moved.pull_s, moved.inject_s = times.extract_s, times.pull_s, times.inject_s
    return moved


def measure(caches: Caches, pulls: Sequence[GroupPull]) -> Moved:
    """Bytes, and the pieces that a straight pull consists of; nothing is moved."""
    moved = Moved()
    for pull in pulls:
        num_runs = _count_runs(pull.src_blocks, pull.dst_blocks)
        for run in caches.layout.runs(caches.group_layers[pull.group]):
            block_bytes = caches.layout.caches[run.model_id][run.start].block_bytes
            moved.num_bytes += block_bytes * len(pull.dst_blocks) * (run.stop - run.start)
            moved.num_pieces += num_runs * (run.stop - run.start)
    return moved


def _count_runs(src: Sequence[int], dst: Sequence[int]) -> int:
    """Runs of blocks that follow one another on both sides."""
    joins = sum(1 for i in range(1, len(src)) if src[i] == src[i - 1] + 1 and dst[i] == dst[i - 1] + 1)
    return len(src) - joins


def _pull_straight(caches: Caches, pulls: Sequence[GroupPull], cluster_id: int, deadline: float, moved: Moved) -> None:
    for pull in pulls:
        for run in caches.layout.runs(caches.group_layers[pull.group]):
            block_bytes = caches.layout.caches[run.model_id][run.start].block_bytes
            step = max(1, SLICE_BYTES // (block_bytes * len(pull.dst_blocks)))
            for first in range(run.start, run.stop, step):
                if time.monotonic() > deadline:
                    raise PullFailedError("deadline: too little lease time was left for the next slice")
                layers = range(first, min(first + step, run.stop))
                caches.manager.pull_blocks(
                    caches.module.BlocksCacheKey(cluster_id, run.model_id),
                    caches.caches[run.model_id],
                    pull.src_blocks,
                    pull.dst_blocks,
                    src_layer_range=layers,
                    dst_layer_range=layers,
                    tensor_num_per_layer=1,
                )
                moved.num_calls += 1
