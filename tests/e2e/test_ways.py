# SPDX-License-Identifier: Apache-2.0
"""Straight and staged, mapped and TCP: the tokens are the aggregated engine's, and the way is the one that was set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import engine_kwargs, prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import Counts, Pair, decode_leg, prefill_leg, start_pair
from tests.lane import LANE
from tests.models import MODELS

pytestmark = pytest.mark.engine

# Straight and mapped: test_pair.py, for every model; straight over TCP: test_topologies.py.
WAYS = {f"{model} staged {transport}": (model, transport) for model, transport in LANE.staged}
MAX_STEP_S = 200e-6  # issue 3: what starting a 16k-token transfer may take of the engine's step


@pytest.fixture(scope="module", params=WAYS)
def staged(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[tuple[Pair, str]]:
    model, transport = WAYS[request.param]
    pair = start_pair(zygote, model, pd_transfer="staged", pd_host_transport=transport)
    yield pair, transport
    pair.close()


def totals(engine: Engine) -> dict[str, Any]:
    return engine.status()["pd"]["totals"]


def link_of(pair: Pair) -> dict[str, Any]:
    (link,) = pair.decode.status()["pd"]["links"]
    return link


def test_staged_tokens_are_the_aggregated_engines(staged: tuple[Pair, str]):
    pair, transport = staged
    block, window = MODELS[pair.model].block_size, MODELS[pair.model].window
    before = totals(pair.decode)
    lengths = [2, block - 1, block + 1, 3 * block + 5, 300]
    lengths += [window - 1 + block + off for off in (0, 1, 2)] if window else []
    for length in lengths:
        assert pair.check([prompt(length, seed=length)]).loaded == length - 1
    mixed = [40 + 31 * number for number in range(8)]
    pair.check([prompt(n, seed=500 + n) for n in mixed])
    after = totals(pair.decode)
    assert after["staged"] - before["staged"] == len(lengths) + len(mixed)
    assert after["seconds"]["inject"] > before["seconds"]["inject"]
    link = link_of(pair)
    assert (link["transport"], link["transfer"]["mode"]) == (transport, "staged")
    assert link["transfer"]["transfers"]["straight"] == 0


def test_a_staged_transfer_is_one_call_and_one_piece_whatever_the_number_of_layers(staged: tuple[Pair, str]):
    pair, _ = staged
    before = totals(pair.decode)
    pair.check([prompt(260, seed=77)])
    after = totals(pair.decode)
    assert (after["calls"] - before["calls"], after["pieces"] - before["pieces"]) == (1, 1)


def test_a_straight_transfer_is_one_call_per_group_and_run_of_layers(zygote: Zygote):
    """One cache group of three layers: one call, and a piece per layer and run of consecutive blocks."""
    pair = start_pair(zygote, "gqa4", pd_transfer="straight")
    try:
        pair.check([prompt(260, seed=77)])
        took = totals(pair.decode)
        assert took["calls"] == 1
        assert took["pieces"] % 3 == 0
        assert took["pieces"] <= 3 * 9
        wire = link_of(pair)["wire"]
        assert (wire["calls"], wire["num_bytes"]) == (1, took["bytes"])
        assert wire["pieces"] <= took["pieces"], "descriptors of the request; the plane may merge more"
        assert (took["staged"], link_of(pair)["transfer"]["model"]) == (0, "this side does not stage")
    finally:
        pair.close()


def test_auto_measures_its_link_and_shows_the_model(zygote: Zygote):
    pair = start_pair(zygote, "gqa2")
    try:
        pair.check([prompt(100, seed=1)])
        transfer = link_of(pair)["transfer"]
        assert transfer["mode"] == "auto"
        assert transfer["model"]["bytes_per_s"] > 1e6
        assert sum(transfer["transfers"].values()) == 1
    finally:
        pair.close()


def test_staged_towards_a_prefill_engine_that_does_not_stage_says_so(zygote: Zygote):
    pair = start_pair(
        zygote,
        "gqa2",
        prefill={"pd_transfer": "straight"},
        decode={"pd_transfer": "staged", "pd_load_failure": "recompute"},
    )
    try:
        tokens = prompt(100, seed=1)
        params = prefill_leg(pair.prefill, [tokens])
        answers = [result.token_ids for result in decode_leg(pair.decode, [tokens], params)]
        assert answers == pair.expected([tokens])
        assert Counts.of(pair.decode).failures == {"staging": 1}
        pair.check_blocks_are_back()
    finally:
        pair.close()


def test_starting_a_16k_token_transfer_takes_hardly_anything_of_the_step(zygote: Zygote):
    """The best of five: this is about our code on the engine's thread, not about who else uses the machine."""
    long = {
        "max_model_len": 16896,
        "hf_overrides": {"max_position_embeddings": 16896},
        "kv_cache_memory_bytes": 192 << 20,
    }
    budget = {"max_num_batched_tokens": 2048}
    prefill = zygote.start("prefill", engine_kwargs("mha", pd_role="prefill", **long, **budget), core=1)
    decode = zygote.start(
        "decode", engine_kwargs("mha", pd_role="decode", enable_prefix_caching=False, **long, **budget), core=0
    )
    try:
        prefill.ready(), decode.ready()
        tokens = prompt(16384, seed=9)
        taken = []
        for _ in range(5):
            before = totals(decode)["seconds"]
            params = prefill_leg(prefill, [tokens])
            decode_leg(decode, [tokens], params, max_tokens=2)
            after = totals(decode)["seconds"]
            taken.append(sum(after[stage] - before[stage] for stage in ("plan", "post")))
        assert Counts.of(decode).loaded == 5 * (len(tokens) - 1)
        print(f"seconds of the step thread: {taken}")
        assert 0 < min(taken) <= MAX_STEP_S
    finally:
        prefill.close()
        decode.close()
