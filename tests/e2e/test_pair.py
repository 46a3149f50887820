# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode engine, every tiny model: PD output is the aggregated engine's, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders import prompt
from tests.e2e.engines import Zygote
from tests.e2e.pairs import PREFILL_TOKEN_BUDGET, Counts, Pair, decode_leg, prefill_leg, start_pair
from tests.lane import LANE
from tests.models import MODELS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=LANE.models)
def pair(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Pair]:
    engines = start_pair(zygote, request.param)
    engines.shake_hands()
    yield engines
    engines.close()


@pytest.fixture
def block(pair: Pair) -> int:
    return MODELS[pair.model].block_size


@pytest.fixture
def caches_prefixes(pair: Pair) -> bool:
    """Upstream's CPU platform switches prefix caching off for MLA."""
    return pair.model != "mla"


LENGTHS = {
    "one token": lambda block: 1,
    "two tokens": lambda block: 2,
    "a block less one": lambda block: block - 1,
    "a block": lambda block: block,
    "a block and one": lambda block: block + 1,
    "three blocks and five": lambda block: 3 * block + 5,
    "chunked on the prefill side": lambda block: 2 * PREFILL_TOKEN_BUDGET + 21,
}


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_the_aggregated_engines_and_all_but_the_last_prompt_token_came_remotely(
    pair: Pair, block: int, length: str
):
    num_tokens = LENGTHS[length](block)
    leases = pair.prefill.total("leases_released")
    took = pair.check([prompt(num_tokens, seed=10_000 + num_tokens)])
    assert took.loaded == num_tokens - 1
    assert (took.transfers, took.empty) == ((1, 0) if num_tokens > 1 else (0, 1))
    assert pair.prefill.total("leases_released") == leases + 1


def test_the_window_may_start_at_any_offset_in_a_block(pair: Pair, block: int):
    """Sliding windows: N - window + 1 a multiple of the block, one less and one more."""
    window = MODELS[pair.model].window
    if not window:
        pytest.skip("no sliding layers")
    lengths = [window - 1 + k * block + off for k in (0, 1, 2) for off in (-1, 0, 1, 2)]
    for num_tokens in lengths:
        assert pair.check([prompt(num_tokens, seed=20_000 + num_tokens)]).loaded == num_tokens - 1


def test_only_what_follows_a_prefix_that_the_decode_side_has_is_moved(pair: Pair, block: int, caches_prefixes: bool):
    first = prompt(4 * block + 7, seed=1)
    pair.check([first])
    second = first[: 2 * block] + prompt(block + 9, seed=2)
    took = pair.check([second])
    if caches_prefixes and not MODELS[pair.model].window:  # of sliding layers only the window's blocks were moved
        assert took.local_hits == 2 * block


def test_a_prompt_that_the_decode_side_has_whole_moves_nothing_or_a_tail(pair: Pair, block: int, caches_prefixes: bool):
    """The third time round the same prompt: its full blocks are there, and exactly one release is sent."""
    tokens = prompt(3 * block + 1, seed=3)
    pair.check([tokens])
    for _ in range(2):
        leases = pair.prefill.total("leases_released")
        took = pair.check([tokens])
        if caches_prefixes:
            assert took == Counts(0, 0, 1, {}, 3 * block)
        assert pair.prefill.total("leases_released") == leases + 1
    longer = tokens[: 3 * block] + prompt(block // 2, seed=4)
    took = pair.check([longer])
    if caches_prefixes:
        assert (took.local_hits, took.loaded) == (3 * block, block // 2 - 1)


def test_a_prefix_that_the_prefill_side_has_cached_is_handed_over(pair: Pair, block: int):
    """P computes only the suffix; its answer still covers the whole prompt."""
    base = prompt(3 * block, seed=5)
    other = base + prompt(5, seed=6)
    expected = pair.expected([other])
    (leased_before,) = prefill_leg(pair.prefill, [other])
    tokens = base + prompt(11, seed=7)
    (leased_after,) = prefill_leg(pair.prefill, [tokens])
    shared = slice(0, 3 if pair.model != "mla" and not MODELS[pair.model].window else 0)
    blocks_before, blocks_after = (p["pd_handoff"]["block_ids"][0] for p in (leased_before, leased_after))
    assert blocks_before[shared] == blocks_after[shared]  # two leases hold the same blocks
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [leased_after])[0].token_ids
    assert Counts.of(pair.decode).since(before).loaded == len(tokens) - 1
    assert [answer] == pair.expected([tokens])
    assert [decode_leg(pair.decode, [other], [leased_before])[0].token_ids] == expected
    pair.check_blocks_are_back()


def test_second_and_third_requests_are_right_too(pair: Pair, block: int):
    for number in range(3):
        pair.check([prompt(2 * block + 3 + number, seed=30 + number)])


def test_eight_concurrent_requests_of_unlike_lengths(pair: Pair, block: int):
    lengths = [1, block - 1, block, block + 1, 2 * block + 7, 3 * block + 5, 5 * block, 6 * block + 1]
    prompts = [prompt(length, seed=40 + length) for length in lengths]
    took = pair.check(prompts)
    assert took.loaded == sum(lengths) - len(lengths)
    assert took.transfers == len(lengths) - 1


def test_a_corrupted_block_changes_the_output(pair: Pair, block: int):
    """Proves that the decode side uses what it pulled, and that the comparison would see wrong bytes."""
    tokens = prompt(3 * block + 5, seed=50)
    expected = pair.expected([tokens])
    (params,) = prefill_leg(pair.prefill, [tokens])
    last_of_each_group = [ids[-1] for ids in params["pd_handoff"]["block_ids"]]
    pair.prefill.call("corrupt_blocks", block_ids=last_of_each_group)
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    assert Counts.of(pair.decode).since(before).loaded == len(tokens) - 1
    assert [answer] != expected
    assert pair.prefill.call("reset_prefix_cache")
    assert pair.decode.call("reset_prefix_cache")
    pair.check_blocks_are_back()
