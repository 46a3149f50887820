# SPDX-License-Identifier: Apache-2.0
"""Which way is faster over one link: a cost model with five numbers, measured by a short probe when it is made.

Pure but for `fit`, which times what it is given. A prediction is in seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from vllm_ascend_pd.transfer.staging.chunks import SLOT_BYTES

ROUNDS = 3
# Staged has to promise this much, as it disturbs both sides' memory and the prefill side's processor.
MARGIN = 0.9


@dataclass(frozen=True)
class LinkModel:
    """Costs of one link. A piece is what a pull moves at once: a block of a layer, or consecutive ones."""

    call_s: float  # fixed, per pull
    piece_s: float  # per piece
    bytes_per_s: float  # of one large piece
    ask_s: float  # one control message to the prefill rank and back
    copy_bytes_per_s: float  # of an extract or inject

    def straight_s(self, num_bytes: int, num_pieces: int) -> float:
        """One pull, block by block."""
        return self.call_s + num_pieces * self.piece_s + num_bytes / self.bytes_per_s

    def staged_s(self, num_bytes: int) -> float:
        """Extract, pull and inject per slot; the next slot is extracted while this one is pulled."""
        num_chunks = max(1, -(-num_bytes // SLOT_BYTES))
        copy_s = num_bytes / self.copy_bytes_per_s
        overhead_s = num_chunks * (2 * self.ask_s + self.call_s + self.piece_s)
        return overhead_s + num_bytes / self.bytes_per_s + copy_s + copy_s / num_chunks

    def prefers_staged(self, num_bytes: int, num_pieces: int) -> bool:
        """Whether staging promises to be clearly faster for this transfer."""
        return self.staged_s(num_bytes) < MARGIN * self.straight_s(num_bytes, num_pieces)

    def describe(self) -> dict[str, float]:
        """For /pd/status."""
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Probe:
    """What `fit` times. Each function does the thing once and blocks until it is done."""

    pull_one: Callable[[], None]  # one piece of `small_bytes`
    pull_scattered: Callable[[], None]  # `num_pieces` pieces of `small_bytes` each, none adjacent
    pull_large: Callable[[], None]  # one piece of `large_bytes`
    ask: Callable[[], None]
    copy_large: Callable[[], None]  # `large_bytes` within this process
    small_bytes: int
    num_pieces: int
    large_bytes: int


def fit(probe: Probe, clock: Callable[[], float] = time.perf_counter) -> LinkModel:
    """Time each part of the probe a few times, and solve for the five numbers."""
    one, scattered, large = (_time(call, clock) for call in (probe.pull_one, probe.pull_scattered, probe.pull_large))
    ask, copy = _time(probe.ask, clock), _time(probe.copy_large, clock)
    # large = call + piece + large_bytes / rate and one = call + piece + small_bytes / rate
    rate = (probe.large_bytes - probe.small_bytes) / max(large - one, 1e-9)
    small_s = probe.small_bytes / rate
    piece = max((scattered - one) / (probe.num_pieces - 1) - small_s, 0.0)
    return LinkModel(
        call_s=max(one - small_s - piece, 0.0),
        piece_s=piece,
        bytes_per_s=rate,
        ask_s=ask,
        copy_bytes_per_s=probe.large_bytes / max(copy, 1e-9),
    )


def _time(call: Callable[[], None], clock: Callable[[], float]) -> float:
    call()  # the first one pays for what is made at first use
    samples = []
    for _ in range(ROUNDS):
        started = clock()
        call()
        samples.append(clock() - started)
    return statistics.median(samples)
