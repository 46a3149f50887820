# SPDX-License-Identifier: Apache-2.0
"""The tiny models are sensitive: a test that compares their tokens would see wrong KV."""

from __future__ import annotations

import pytest

from tests.builders import engine_kwargs, prompt, sampling
from tests.e2e.engines import Zygote
from tests.lane import LANE
from tests.models import MODELS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", LANE.models)
def test_changing_any_early_block_of_the_prompt_changes_the_greedy_tokens(zygote: Zygote, name: str):
    engine = zygote.start(f"sensitivity-{name}", engine_kwargs(name, enable_prefix_caching=False))
    block = MODELS[name].block_size
    base = prompt(5 * block + 3, seed=1)
    variants = []
    for index in range(5):
        changed = list(base)
        changed[index * block : (index + 1) * block] = prompt(block, seed=100 + index)
        variants.append(changed)
    original, *others = (r.token_ids for r in engine.generate([base, *variants], [sampling()] * 6))
    engine.close()
    assert len(set(original)) >= 8, f"degenerate output {original}"
    assert all(other != original for other in others)


@pytest.mark.parametrize("name", LANE.models)
def test_batched_and_chunked_prefill_give_the_tokens_of_a_request_alone(zygote: Zygote, name: str):
    """The oracle does not depend on how its engine was loaded; without this, comparing tokens would be luck."""
    engine = zygote.start(
        f"batching-{name}",
        engine_kwargs(name, enable_prefix_caching=False, max_num_batched_tokens=128, max_num_seqs=16),
    )
    prompts = [prompt(length, seed=length) for length in (5, 33, 77, 101, 150, 200, 260, 300)]
    together = [r.token_ids for r in engine.generate(prompts, [sampling()] * len(prompts))]
    alone = [engine.generate([tokens], [sampling()])[0].token_ids for tokens in prompts]
    engine.close()
    assert together == alone
