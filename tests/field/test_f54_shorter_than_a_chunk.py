# SPDX-License-Identifier: Apache-2.0
"""F54: a prompt that is shorter than a prefill chunk.

Must: it works. Was: the decode side waits for ever.
"""

from __future__ import annotations

import random

import pytest

from tests.builders import prompt
from tests.e2e.pairs import PREFILL_TOKEN_BUDGET, Pair

pytestmark = pytest.mark.engine


def test_f54_lengths_from_one_token_to_two_chunks(pair: Pair):
    """Ten tokens against a chunk of 128, every length around the chunk's ends, and a sample of the rest."""
    chunk = PREFILL_TOKEN_BUDGET
    fixed = {1, 2, 3, 10, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk}
    lengths = sorted(fixed | set(random.Random(54).sample(range(1, 2 * chunk), 15)))
    for length in lengths:
        assert pair.check([prompt(length, seed=length)], max_tokens=4).loaded == length - 1
