# SPDX-License-Identifier: Apache-2.0
"""F01: the decode side pulls after the lease has ended and the blocks were rewritten.

Must: the pull is refused as expired and the request is recomputed or fails. Was: garbage text with HTTP 200.
"""

from __future__ import annotations

import pytest

from tests.builders import prompt, sampling
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import Counts, decode_leg, prefill_leg, start_pair
from tests.field.conftest import BLOCK, MODEL, POOL_BLOCKS, SMALL_POOL_BYTES
from vllm_ascend_pd.transfer.lease import LeaseTable


@pytest.mark.engine
def test_f01_a_pull_from_rewritten_blocks_is_refused_and_the_prompt_recomputed(zygote: Zygote, engines: list[Engine]):
    pair = start_pair(zygote, MODEL, kv_cache_memory_bytes=SMALL_POOL_BYTES, prefill={"pd_lease": "1s"})
    engines.extend(pair.engines())
    tokens = prompt(6 * BLOCK + 5, seed=1)
    (params,) = prefill_leg(pair.prefill, [tokens])
    assert pair.prefill.status()["pd"]["leases"]["held"] == 1
    pair.prefill.wait_for_free_blocks(pair.free[0], timeout_s=10)
    assert pair.prefill.total("leases_expired") == 1
    # Other prompts take every block of the pool once.
    others = [prompt(10 * BLOCK, seed=100 + number) for number in range(POOL_BLOCKS // 10 + 1)]
    for other in others:
        pair.prefill.generate([other], [sampling(1)])
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    took = Counts.of(pair.decode).since(before)
    assert [answer] == pair.expected([tokens])
    assert (took.loaded, took.transfers) == (0, 0)
    assert sum(took.failures.values()) == 1
    assert any("lease" in reason for reason in took.failures), took.failures
    pair.check_blocks_are_back()


@pytest.mark.engine
def test_f01_a_lease_that_ends_while_the_decode_side_is_busy_is_noticed(zygote: Zygote, engines: list[Engine]):
    """The same, but the request had been in D's queue in time: D was busy with a long step until the lease was over."""
    pair = start_pair(zygote, MODEL, prefill={"pd_lease": "1s"})
    engines.extend(pair.engines())
    tokens = prompt(3 * BLOCK + 5, seed=2)
    expected = pair.expected([tokens])
    (params,) = prefill_leg(pair.prefill, [tokens])
    pair.decode.call("pause", paused=True)
    waiting = pair.decode.submit([tokens], [sampling(extra_args={"kv_transfer_params": params})])
    pair.prefill.wait_for_free_blocks(pair.free[0], timeout_s=10)
    pair.decode.call("pause", paused=False)
    assert [pair.decode.wait(waiting)[0].token_ids] == expected
    assert Counts.of(pair.decode).loaded == 0
    pair.check_blocks_are_back()


def test_f01_a_lease_that_ends_during_the_read_is_not_confirmed_afterwards():
    """A one-sided read cannot be refused while it runs; the release after it is told that the lease was lost."""
    now = [100.0]
    table = LeaseTable(lease_s=1.0, clock=lambda: now[0], max_unsigned_blocks=10)
    lease = table.grant("transfer", ((1, 2),), num_ranks=None, signed=True, payload=None).lease
    assert lease is not None
    assert table.renew(lease.lease_id, "transfer", 0, 1).held
    now[0] += 1.5
    table.expire_due()
    verdict = table.release(lease.lease_id, "transfer", 0, 1)
    assert not verdict.held
    assert verdict.state == "expired"
