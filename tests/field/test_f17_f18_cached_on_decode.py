# SPDX-License-Identifier: Apache-2.0
"""F17 and F18: the decode side has a part, or all, of the prompt in its prefix cache.

Must: it works, and the prefill side's usage returns to where it was. Was: a crash (fewer ids than expected), and
blocks held until a timeout.
"""

from __future__ import annotations

import pytest

from tests.builders import prompt
from tests.e2e.pairs import Pair
from tests.field.conftest import BLOCK

pytestmark = pytest.mark.engine
REPEATS = 50


def test_f17_the_same_prompt_with_new_suffixes(pair: Pair):
    base = prompt(3 * BLOCK, seed=1)
    for number in range(4):
        took = pair.check([base + prompt(7 + 5 * number, seed=10 + number)])
        assert took.local_hits == (0 if number == 0 else 3 * BLOCK)


@pytest.mark.parametrize("length", [10 * BLOCK + 1, 5])
def test_f18_a_prompt_sent_fifty_times_leaves_nothing_held(pair: Pair, length: int):
    """11 of 128 blocks each time: a dozen repeats that leaked would stall the pool."""
    tokens = prompt(length, seed=2)
    pair.check([tokens])
    leases = pair.prefill.total("leases_released")
    expired = pair.prefill.total("leases_expired")
    for _ in range(REPEATS):
        pair.transfer([tokens], max_tokens=1)
    pair.check_blocks_are_back(timeout_s=5)
    assert pair.prefill.total("leases_released") == leases + REPEATS
    assert pair.prefill.total("leases_expired") == expired
