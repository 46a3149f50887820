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


@pytest.fixture(scope="package")
def shared_pair(zygote: Zygote) -> Iterator[Pair]:
    """Default flags, the smallest pool on each side."""
    pair = start_pair(zygote, MODEL, kv_cache_memory_bytes=SMALL_POOL_BYTES)
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The shared pair with empty prefix caches; its blocks have to be back at the end."""
    for engine in shared_pair.engines():
        assert engine.call("reset_prefix_cache")
    yield shared_pair
    shared_pair.check_blocks_are_back()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines that a test started itself; closed at the end, killed ones too."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()
