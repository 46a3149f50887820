# SPDX-License-Identifier: Apache-2.0
"""F07: a prompt longer than the KV pool or the maximum input.

Must: a clear refusal, nothing transferred. Was: the prefill side reported one prompt token and the decode side
decoded unrelated text. The HTTP half (4xx) is in tests/e2e/http.
"""

from __future__ import annotations

import pytest

from tests.builders import MAX_MODEL_LEN, decode_sampling, engine_kwargs, prefill_sampling, prompt
from tests.e2e.engines import Engine, EngineFailure, Zygote
from tests.e2e.pairs import Counts, Pair, prefill_leg
from tests.field.conftest import BLOCK
from tests.lane import LANE

pytestmark = pytest.mark.engine


def test_f07_a_prompt_over_the_maximum_length_is_refused_on_both_sides_and_nothing_moves(pair: Pair):
    tokens = prompt(MAX_MODEL_LEN + 5, seed=1)
    before = Counts.of(pair.decode)
    leases = pair.prefill.total("leases_granted")
    with pytest.raises(EngineFailure, match=str(MAX_MODEL_LEN)):
        pair.prefill.generate([tokens], [prefill_sampling()])
    assert pair.prefill.total("leases_granted") == leases
    start = tokens[:64]
    (params,) = prefill_leg(pair.prefill, [start])
    with pytest.raises(EngineFailure, match=str(MAX_MODEL_LEN)):
        pair.decode.generate([tokens], [decode_sampling(params)])
    assert Counts.of(pair.decode).since(before).loaded == 0
    pair.decode.generate([start], [decode_sampling(params)])  # the handoff is good for the prompt that it was made for
    assert Counts.of(pair.decode).since(before).loaded == 63


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_f07_a_pool_that_cannot_hold_one_prompt_is_refused_at_start(zygote: Zygote, engines: list[Engine], role: str):
    """Memory for 50 blocks, of which alignment leaves 32, or for 39: a prompt of 40 blocks would wait for ever."""
    memory = (50 if LANE.rounds_blocks else 39) * 2 * (64 << 10)
    arguments = engine_kwargs("mha", pd_role=role, max_model_len=40 * BLOCK, kv_cache_memory_bytes=memory)
    engine = zygote.start(f"small-{role}", arguments)
    engines.append(engine)
    error = engine.start_error()
    assert "--max-model-len" in error or "max_model_len" in error, error
