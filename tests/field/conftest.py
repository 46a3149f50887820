# SPDX-License-Identifier: Apache-2.0
"""One pair with small pools (128 blocks), shared by the field tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import Pair, start_pair

MODEL = "gqa2"
BLOCK = 32
# The least that 2 MiB alignment allows for this model: 4 layers of 16 KiB a block.
POOL_BLOCKS = 128
SMALL_POOL_BYTES = POOL_BLOCKS * 4 * (16 << 10)


class PairKeeper:
    """Starts the shared pair when first wanted, and anew after a test that broke it."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._pair: Pair | None = None

    def get(self) -> Pair:
        """The pair, with empty prefix caches."""
        if self._pair is not None and not all(engine.is_alive() for engine in self._pair.engines()):
            self.drop()
        if self._pair is None:
            self._pair = start_pair(self._zygote, MODEL, kv_cache_memory_bytes=SMALL_POOL_BYTES)
        for engine in self._pair.engines():
            assert engine.call("reset_prefix_cache")
        return self._pair

    def drop(self) -> None:
        """Close what there is."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None


@pytest.fixture(scope="package")
def keeper(zygote: Zygote) -> Iterator[PairKeeper]:
    """For all field tests."""
    one = PairKeeper(zygote)
    yield one
    one.drop()


@pytest.fixture
def pair(keeper: PairKeeper) -> Iterator[Pair]:
    """Default flags, the smallest pool on each side; its blocks have to be back at the end."""
    shared = keeper.get()
    yield shared
    try:
        shared.check_blocks_are_back()
    except BaseException:
        keeper.drop()
        raise


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines that a test started itself; closed at the end, killed ones too."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()
