# SPDX-License-Identifier: Apache-2.0
"""The cost model: the probe's times give the link's numbers back, and the numbers decide."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.transfer.staging.cost import LinkModel, Probe, fit

MIB = 1 << 20
# Per call, per piece, bytes/s, per control message, copying bytes/s.
A2_ROCE = LinkModel(20e-6, 20e-6, 24e9, 200e-6, 400e9)  # reference/peers.md: 16 KiB pieces 0.7 GB/s, large ones 24
MAPPED = LinkModel(20e-6, 0.1e-6, 8e9, 200e-6, 8e9)


class World:
    """A link that takes exactly as long as a model says."""

    def __init__(self, truth: LinkModel) -> None:
        self.truth = truth
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float):
        def call() -> None:
            self.now += seconds

        return call

    def probe(self, small: int = 16384, pieces: int = 256, large: int = 4 * MIB) -> Probe:
        truth = self.truth
        return Probe(
            pull_one=self.spend(truth.straight_s(small, 1)),
            pull_scattered=self.spend(truth.straight_s(small * pieces, pieces)),
            pull_large=self.spend(truth.straight_s(large, 1)),
            ask=self.spend(truth.ask_s),
            copy_large=self.spend(large / truth.copy_bytes_per_s),
            small_bytes=small,
            num_pieces=pieces,
            large_bytes=large,
        )


@pytest.mark.parametrize("truth", [A2_ROCE, MAPPED])
def test_the_probe_finds_the_links_numbers(truth: LinkModel):
    world = World(truth)
    found = fit(world.probe(), world.clock)
    for name, value in found.describe().items():
        assert value == pytest.approx(getattr(truth, name), rel=0.01), name


@pytest.mark.parametrize(
    ("model", "num_bytes", "num_pieces", "staged"),
    [
        (A2_ROCE, 64 * MIB, 64 * 64, True),  # 16 KiB pieces
        (A2_ROCE, 64 * MIB, 32, False),  # 2 MiB pieces
        (A2_ROCE, 16384, 1, False),
        (MAPPED, 64 * MIB, 64 * 64, False),
        (MAPPED, 64 * MIB, 32, False),
    ],
)
def test_staging_is_chosen_where_the_wire_hates_small_pieces(model, num_bytes, num_pieces, staged):
    assert model.prefers_staged(num_bytes, num_pieces) is staged


def test_noise_that_turns_the_samples_round_gives_no_nonsense():
    """A large piece that came faster than a small one, and scattered ones faster than one."""
    world = World(MAPPED)
    probe = world.probe()
    odd = Probe(**{**vars(probe), "pull_large": world.spend(1e-6), "pull_scattered": world.spend(1e-6)})
    model = fit(odd, world.clock)
    assert all(value >= 0 for value in model.describe().values())
    assert model.prefers_staged(64 * MIB, 4096) in (True, False)
