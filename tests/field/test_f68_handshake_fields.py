# SPDX-License-Identifier: Apache-2.0
"""F68: prefill and decode differ in version, model, weights, dtype, …

Must: a named mismatch before anything moves. Was: a crash, or silent mixing of weights.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.builders import engine_kwargs, prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import Counts, Pair, decode_leg, prefill_leg
from tests.field.conftest import BLOCK
from tests.field.peer import cancel, control_client, secret_of
from vllm_ascend_pd.handshake import MUST_BE_EQUAL, MUST_OVERLAP
from vllm_ascend_pd.wire import WIRE_VERSION, Hello, HelloReply, Refused

pytestmark = pytest.mark.engine


def say_hello(zygote: Zygote, pair: Pair, record: dict[str, Any], wire_version: int = WIRE_VERSION) -> Any:
    hello = Hello(wire_version=wire_version, engine_id="stranger", epoch="1", record=record)
    with control_client(pair.prefill, secret_of(zygote)) as client:
        return client.request(hello, 5.0, 2)


def mutate(value: Any) -> Any:
    """Another value of the same shape, as deep inside as possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value[:-1], mutate(value[-1])] if value else ["x"]
    if isinstance(value, dict):
        key = sorted(value)[-1]
        return {**value, key: mutate(value[key])}
    return f"{value}x"


def test_f68_the_decode_engines_own_record_is_accepted(zygote: Zygote, pair: Pair):
    assert isinstance(say_hello(zygote, pair, pair.decode.call("record")), HelloReply)


@pytest.mark.parametrize("field", [*MUST_BE_EQUAL, *MUST_OVERLAP])
def test_f68_one_field_that_differs_is_refused_by_name_with_both_values(zygote: Zygote, pair: Pair, field: str):
    record = copy.deepcopy(pair.decode.call("record"))
    ours = record[field]
    record[field] = ["carrier pigeon"] if field in MUST_OVERLAP else mutate(ours)
    answer = say_hello(zygote, pair, record)
    assert isinstance(answer, Refused)
    assert answer.field.startswith(field)
    assert answer.theirs
    assert answer.ours != answer.theirs
    assert answer.field in answer.message


@pytest.mark.parametrize("field", MUST_BE_EQUAL)
def test_f68_a_field_that_is_missing_is_refused_by_name(zygote: Zygote, pair: Pair, field: str):
    record = pair.decode.call("record")
    del record[field]
    answer = say_hello(zygote, pair, record)
    assert isinstance(answer, Refused)
    assert answer.field.startswith(field)


def test_f68_another_wire_version_is_refused_before_the_record_is_looked_at(zygote: Zygote, pair: Pair):
    answer = say_hello(zygote, pair, {}, wire_version=WIRE_VERSION + 1)
    assert isinstance(answer, Refused)
    assert answer.field == "wire_version"


def test_f68_a_handoff_of_another_models_engine_is_not_loaded(zygote: Zygote, pair: Pair, engines: list[Engine]):
    """Same tokenizer, another model: the decode engine computes the prompt itself and says why."""
    stranger = zygote.start("other-model", engine_kwargs("gqa4", pd_role="prefill"), core=1)
    engines.append(stranger)
    tokens = prompt(2 * BLOCK + 5, seed=1)
    (params,) = prefill_leg(stranger, [tokens])
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    took = Counts.of(pair.decode).since(before)
    assert [answer] == pair.expected([tokens])
    assert (took.loaded, sum(took.failures.values())) == (0, 1)
    assert "num_hidden_layers" in pair.decode.log_tail(20_000) or "model_config" in pair.decode.log_tail(20_000)
    cancel(stranger, secret_of(zygote), [params["pd_handoff"]["transfer_id"]])
