# SPDX-License-Identifier: Apache-2.0
"""Several prefill or decode engines, the TCP data plane, and the real demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders import engine_kwargs, prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import PREFILL_TOKEN_BUDGET, Counts, Pair, decode_leg, prefill_leg, start_pair
from tests.lane import LANE
from tests.models import MODELS

pytestmark = pytest.mark.engine
MODEL = "gqa2"
BLOCK = 32


@pytest.fixture
def extra(zygote: Zygote) -> Iterator[list[Engine]]:
    """Engines beyond a pair's; closed at the end."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("model", LANE.straight_tcp)
def test_over_tcp_the_tokens_are_the_same_also_with_eight_at_once(zygote: Zygote, model: str):
    pair = start_pair(zygote, model, pd_host_transport="tcp", pd_transfer="straight")
    block = MODELS[model].block_size
    try:
        for length in (1, block - 1, block, block + 1, 3 * block + 5, 300):
            assert pair.check([prompt(length, seed=length)]).loaded == length - 1
        lengths = [40 + 31 * number for number in range(8)]
        assert pair.check([prompt(n, seed=500 + n) for n in lengths]).loaded == sum(lengths) - 8
    finally:
        pair.close()


def test_blocks_of_another_size(zygote: Zygote):
    block = LANE.other_block
    pair = start_pair(zygote, MODEL, block_size=block)
    try:
        for length in (1, block - 1, block, block + 1, 2 * BLOCK + block + 1, 300):
            assert pair.check([prompt(length, seed=800 + length)]).loaded == length - 1
    finally:
        pair.close()


def test_a_decode_engine_loads_from_two_prefill_engines_at_once(zygote: Zygote, extra: list[Engine]):
    second = zygote.start("prefill-2", engine_kwargs(MODEL, pd_role="prefill"), core=1)
    extra.append(second)
    pair = start_pair(zygote, MODEL)
    try:
        free = second.free_blocks()
        prompts = [prompt(50 + 17 * number, seed=600 + number) for number in range(8)]
        params = [None] * 8
        params[0::2] = prefill_leg(pair.prefill, prompts[0::2])
        params[1::2] = prefill_leg(second, prompts[1::2])
        assert len({p["remote_engine_id"] for p in params}) == 2
        answers = [r.token_ids for r in decode_leg(pair.decode, prompts, params)]
        assert answers == pair.expected(prompts)
        counts = Counts.of(pair.decode)
        assert (counts.loaded, counts.transfers, counts.failures) == (sum(map(len, prompts)) - 8, 8, {})
        assert len(pair.decode.status()["pd"]["peers"]) == 2
        second.wait_for_free_blocks(free)
        pair.check_blocks_are_back()
    finally:
        pair.close()


def test_two_decode_engines_load_from_one_prefill_engine(zygote: Zygote, extra: list[Engine]):
    second = zygote.start("decode-2", engine_kwargs(MODEL, pd_role="decode"), core=1)
    extra.append(second)
    pair = start_pair(zygote, MODEL)
    try:
        free = second.free_blocks()
        prompts = [prompt(45 + 23 * number, seed=700 + number) for number in range(8)]
        params = prefill_leg(pair.prefill, prompts)
        halves = (pair.decode, prompts[0::2], params[0::2]), (second, prompts[1::2], params[1::2])
        answers: list[tuple[int, ...]] = [()] * 8
        answers[0::2], answers[1::2] = ([r.token_ids for r in decode_leg(*half)] for half in halves)
        assert answers == pair.expected(prompts)
        for engine, some, _ in halves:
            assert Counts.of(engine).loaded == sum(map(len, some)) - 4
        assert len(pair.prefill.status()["pd"]["peers"]) == 2
        second.wait_for_free_blocks(free)
        pair.check_blocks_are_back()
    finally:
        pair.close()


def test_the_demo_model_answers_the_same_through_a_pair(zygote: Zygote):
    """Gemma 3 270M with its real weights: sliding windows, six cache groups over three raw tensors."""
    from transformers import AutoTokenizer

    from tools.demo_model import ensure_demo_model

    folder = str(ensure_demo_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["What is the largest animal in the world?", "Q: What is the capital of France?\nA:"]
    prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    story = tokenizer("The history of the city of Paris is long and rich. " * 60)["input_ids"]
    prompts.append(story[:540])  # longer than the window of 512
    # Upstream warms up with as many tokens as a step may have: its default of 4096 takes minutes with this vocabulary.
    pair: Pair = start_pair(
        zygote,
        folder,
        kv_cache_memory_bytes=256 << 20,
        max_num_batched_tokens=PREFILL_TOKEN_BUDGET,
        max_num_seqs=16,
    )
    try:
        took = pair.check(prompts)
        assert took.loaded == sum(map(len, prompts)) - len(prompts)
        assert "Paris" in tokenizer.decode(pair.expected([prompts[1]])[0])
    finally:
        pair.close()
