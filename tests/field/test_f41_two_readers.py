# SPDX-License-Identifier: Apache-2.0
"""F41, the nearest thing: a router gives one handoff to two decode engines (a retry after a timeout).

Must: at most one of them uses it. Was: the second one's release heard the first one's verdict, "held", although the
blocks had been given to others while it read.
"""

from __future__ import annotations

import pytest

from tests.builders import decode_sampling, engine_kwargs, prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import Counts, Pair, prefill_leg
from tests.field.conftest import BLOCK, MODEL, SMALL_POOL_BYTES
from vllm_ascend_pd.transfer.lease import LeaseTable


def test_f41_a_lease_has_one_reader_and_a_second_one_is_never_told_that_it_held_it():
    table = LeaseTable(lease_s=30.0)
    lease = table.grant("transfer", ((1, 2),), num_ranks=None, signed=True, payload=None).lease
    assert lease is not None
    asked = (lease.lease_id, "transfer", 0, 1)
    assert table.renew(*asked, "first").held
    assert not table.renew(*asked, "second").held
    assert table.release(*asked, "first").held
    assert not table.release(*asked, "second").held
    assert table.release(*asked, "first").held  # its own repeat


@pytest.mark.engine
def test_f41_two_decode_engines_with_one_handoff_both_answer_rightly(zygote: Zygote, pair: Pair, engines: list[Engine]):
    second = zygote.start(
        "decode-2", engine_kwargs(MODEL, pd_role="decode", kv_cache_memory_bytes=SMALL_POOL_BYTES), core=1
    )
    engines.append(second)
    second.ready()
    for number in range(5):
        tokens = prompt(5 * BLOCK + 3, seed=number)
        (params,) = prefill_leg(pair.prefill, [tokens])
        before = Counts.of(pair.decode).loaded + Counts.of(second).loaded
        sent = [(engine, engine.submit([tokens], [decode_sampling(params)])) for engine in (pair.decode, second)]
        answers = [engine.wait(ids)[0].token_ids for engine, ids in sent]
        assert answers == pair.expected([tokens]) * 2
        assert Counts.of(pair.decode).loaded + Counts.of(second).loaded - before in (0, len(tokens) - 1)
