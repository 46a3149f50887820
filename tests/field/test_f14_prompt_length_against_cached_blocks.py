# SPDX-License-Identifier: Apache-2.0
"""F14: block boundaries against what the decode side has cached, and a prompt that is longer than the handoff.

Must: D reads the remote blocks it lacks and computes the tail. Was: an assertion, or pairing by count.
"""

from __future__ import annotations

import pytest

from tests.builders import prompt, sampling
from tests.e2e.pairs import Counts, Pair, decode_leg, prefill_leg
from tests.field.conftest import BLOCK

pytestmark = pytest.mark.engine

CASES = [(k, offset, cached) for k in (1, 2, 3) for offset in (-1, 0, 1) for cached in range(k + 1)]


@pytest.mark.parametrize(("blocks", "offset", "cached"), CASES)
def test_f14_every_length_around_a_boundary_with_every_number_of_cached_blocks(
    pair: Pair, blocks: int, offset: int, cached: int
):
    tokens = prompt(blocks * BLOCK + offset, seed=1000 * blocks + 10 * offset + cached)
    warm = tokens[: cached * BLOCK]
    if warm:
        pair.decode.generate([warm], [sampling(1)])
    took = pair.check([tokens])
    usable = min(len(warm) // BLOCK, (len(tokens) - 1) // BLOCK)
    assert took.local_hits == usable * BLOCK
    assert took.loaded == len(tokens) - 1 - usable * BLOCK


@pytest.mark.parametrize("cached", [0, 1, 2])
@pytest.mark.parametrize("more", [1, 2, BLOCK, 2 * BLOCK + 3])
def test_f14_a_prompt_longer_than_the_handoff_loads_what_there_is_and_computes_the_tail(
    pair: Pair, more: int, cached: int
):
    """A proxy appended the first token to D's prompt."""
    tokens = prompt(2 * BLOCK + more, seed=77 + more + 1000 * cached)
    handed = tokens[: 2 * BLOCK]
    if cached:
        pair.decode.generate([tokens[: cached * BLOCK]], [sampling(1)])
    (params,) = prefill_leg(pair.prefill, [handed])
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    took = Counts.of(pair.decode).since(before)
    assert [answer] == pair.expected([tokens])
    assert took.failures == {}
    assert took.loaded == (2 - cached) * BLOCK


def test_f14_a_handoff_of_another_prompt_is_refused_and_the_prompt_computed(pair: Pair):
    """Same length, one token differs: its KV must not be used."""
    tokens = prompt(2 * BLOCK + 5, seed=5)
    other = [*tokens[:3], (tokens[3] + 1) % 256, *tokens[4:]]
    (params,) = prefill_leg(pair.prefill, [other])
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    took = Counts.of(pair.decode).since(before)
    assert [answer] == pair.expected([tokens])
    assert (took.loaded, sum(took.failures.values())) == (0, 1)
