# SPDX-License-Identifier: Apache-2.0
"""F41: the engine adds a random suffix to request ids. F50: a client cancels after the prefill.

Must: a transfer is keyed by an id that both sides share; a cancel frees the prefill side's blocks within seconds.
Was: a hang or a lookup miss; blocks held for 480 s and more.
"""

from __future__ import annotations

import pytest

from tests.builders import decode_sampling, prompt, sampling
from tests.e2e.engines import Zygote
from tests.e2e.pairs import Counts, Pair, decode_leg, prefill_leg
from tests.field.conftest import BLOCK
from tests.field.peer import cancel, secret_of
from vllm_ascend_pd.handoff import ask_bytes

pytestmark = pytest.mark.engine
CANCELS = 100
FREED_WITHIN_S = 5.0


def test_f41_both_sides_key_the_transfer_by_the_same_id_whatever_their_request_ids_are(pair: Pair):
    tokens = prompt(2 * BLOCK, seed=1)
    (params,) = prefill_leg(pair.prefill, [tokens])
    (request_id,) = pair.decode.submit([tokens], [decode_sampling(params)])
    internal = pair.decode.internal_ids[request_id]
    assert internal != request_id
    assert params["remote_request_id"] != internal
    assert internal not in params["pd_handoff"]["transfer_id"]
    before = pair.prefill.total("leases_expired")
    assert [pair.decode.wait([request_id])[0].token_ids] == pair.expected([tokens])
    pair.check_blocks_are_back(FREED_WITHIN_S)  # released under P's own lease and transfer id
    assert pair.prefill.total("leases_expired") == before


def test_f41_two_requests_may_bring_the_same_handoff_and_neither_is_wrong(pair: Pair):
    """A proxy that sends a request twice. The lease is released once; the other computes its prompt itself."""
    tokens = prompt(2 * BLOCK + 3, seed=2)
    (params,) = prefill_leg(pair.prefill, [tokens])
    answers = [r.token_ids for r in decode_leg(pair.decode, [tokens, tokens], [params, params])]
    assert answers == pair.expected([tokens]) * 2


def test_f50_a_hundred_cancels_between_the_legs_leave_nothing_held(zygote: Zygote, pair: Pair):
    """D's front door tells P when a client has gone; many more of them than the pool could hold at once."""
    secret = secret_of(zygote)
    before = pair.prefill.total("leases_cancelled")
    for start in range(0, CANCELS, 10):
        params = prefill_leg(pair.prefill, [prompt(BLOCK + start + n, seed=100 + start + n) for n in range(10)])
        cancel(pair.prefill, secret, [p["pd_handoff"]["transfer_id"] for p in params])
        pair.prefill.wait_for_free_blocks(pair.free[0], FREED_WITHIN_S)
    assert pair.prefill.total("leases_cancelled") == before + CANCELS


def test_f50_a_cancel_that_comes_before_the_prefill_has_ended_leaves_no_lease(zygote: Zygote, pair: Pair):
    """The request is signed and named by the decode side; its cancel overtakes the answer."""
    secret = secret_of(zygote)
    transfer_id = "decode-engine/epoch/request-1/0"
    token = secret.sign("ask", ask_bytes(transfer_id, ""))
    ask = {"do_remote_decode": True, "pd_transfer_id": transfer_id, "pd_ask": token}
    cancel(pair.prefill, secret, [transfer_id])
    result = pair.prefill.generate([prompt(3 * BLOCK, seed=3)], [sampling(1, extra_args={"kv_transfer_params": ask})])[
        0
    ]
    assert not result.kv_transfer_params
    pair.prefill.wait_for_free_blocks(pair.free[0], FREED_WITHIN_S)


@pytest.mark.parametrize("paused", [True, False], ids=["before admission", "at any point of the load"])
def test_f50_aborts_on_the_decode_side_free_both_sides(pair: Pair, paused: bool):
    for number in range(10):
        tokens = [prompt(4 * BLOCK + n, seed=1000 * number + n) for n in range(4)]
        params = prefill_leg(pair.prefill, tokens)
        if paused:
            pair.decode.call("pause", paused=True)
        ids = pair.decode.submit(tokens, [decode_sampling(p) for p in params])
        pair.decode.abort(ids)
        if paused:
            pair.decode.call("pause", paused=False)
        pair.check_blocks_are_back(FREED_WITHIN_S)
    status = pair.decode.wait_until(lambda s: s["requests"] == 0, "no request left", FREED_WITHIN_S)
    assert not any(status["pd"]["transfers_in_flight"].values())
    before = Counts.of(pair.decode)
    pair.check([prompt(70, seed=5)])
    assert Counts.of(pair.decode).since(before).loaded == 69
