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
from tests.field.conftest import MODEL

pytestmark = pytest.mark.engine


def test_f07_a_prompt_over_the_maximum_length_is_refused_on_both_sides_and_nothing_moves(pair: Pair):
    tokens = prompt(MAX_MODEL_LEN + 5, seed=1)
    before = Counts.of(pair.decode)
    leases = pair.prefill.total("leases_granted")
    with pytest.raises(EngineFailure, match=str(MAX_MODEL_LEN)):
        pair.prefill.generate([tokens], [prefill_sampling()])
    (params,) = prefill_leg(pair.prefill, [tokens[:64]])
    with pytest.raises(EngineFailure, match=str(MAX_MODEL_LEN)):
        pair.decode.generate([tokens], [decode_sampling(params)])
    assert pair.prefill.total("leases_granted") == leases + 1
    assert Counts.of(pair.decode).since(before).loaded == 0
    pair.transfer([tokens[:64]])  # a client that asks properly is served as before
    port = pair.prefill.status()["pd"]["control"]["port"]
    assert port == params["remote_port"]
    release(pair, params)


def release(pair: Pair, params: dict) -> None:
    """Give the lease of an unused handoff back, by its decode side asking with the right prompt."""
    pair.decode.generate([prompt(MAX_MODEL_LEN + 5, seed=1)[:64]], [decode_sampling(params)])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_f07_a_pool_that_cannot_hold_one_prompt_is_refused_at_start(
    zygote: Zygote, engines: list[Engine], role: str
):
    """80 blocks of memory, of which alignment leaves 64: a prompt of 75 blocks would wait for ever."""
    arguments = engine_kwargs(MODEL, pd_role=role, max_model_len=75 * 32, kv_cache_memory_bytes=80 * 32 * 1024 * 4)
    engine = zygote.start(f"small-{role}", arguments)
    engines.append(engine)
    error = engine.start_error()
    assert "max_model_len" in error or "max-model-len" in error or "kv-cache-memory" in error, error
