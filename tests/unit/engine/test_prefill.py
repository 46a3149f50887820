# SPDX-License-Identifier: Apache-2.0
"""The prefill half: one lease per finished prompt, its blocks referenced once and freed once, hellos by field."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.engine.fakes import BLOCK, GROUPS, PROMPT, SECRET, make_config, make_request
from vllm_ascend_pd.config import PDRole
from vllm_ascend_pd.engine import prefill as module
from vllm_ascend_pd.engine.prefill import PrefillHalf
from vllm_ascend_pd.engine.stats import StatsRecorder
from vllm_ascend_pd.handoff import ask_bytes, from_kv_transfer_params, prompt_digest, verify_handoff
from vllm_ascend_pd.plan.layout import layout_fingerprint
from vllm_ascend_pd.transfer.lease import LeaseTable
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    CancelTransfer,
    Hello,
    HelloReply,
    LeaseRelease,
    LeaseRenew,
    RankAddress,
    Refused,
)

RECORD = {"dtype": "float32", "block_size": BLOCK, "transports": ["mapped", "tcp"]}


class FakePool:
    """A BlockPool: reference counts only. Block 0 is the null block."""

    def __init__(self, num_blocks: int = 20) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=1) for i in range(num_blocks)]  # held by the request
        self.freed: list[int] = []

    def touch(self, blocks) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "freed more often than referenced"
            self.freed.append(block.block_id)


class Prefill:
    """A PrefillHalf with its clock, its pool and its wake-ups."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stats = StatsRecorder()
        self.pool = FakePool()
        self.wakes = 0
        self.half = PrefillHalf(
            make_config(PDRole.PREFILL), SECRET, RECORD, layout_fingerprint(GROUPS), 1,
            LeaseTable(30.0, clock=lambda: self.now), self.stats,
        )  # fmt: skip
        self.half.bind_pool(self.pool)
        self.half.wake = self._wake
        self.half.peer_port = 77
        self.half.ranks = (RankAddress(tp_rank=0, cluster_id=1, host="127.0.0.1", port=2),)

    def _wake(self) -> None:
        self.wakes += 1

    def finish(self, block_ids=((5, 6, 0, 7),), status="FINISHED_LENGTH_CAPPED", params=None, **values):
        params = {"do_remote_decode": True} if params is None else params
        request = make_request("r", params, status=SimpleNamespace(name=status), **values)
        return self.half.request_finished(request, block_ids)

    def references(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks if block.ref_cnt > 1]

    def ask(self, handler, message):
        answers: list = []
        handler(message, SimpleNamespace(send=answers.append))
        (answer,) = answers
        return answer


@pytest.fixture
def p() -> Prefill:
    return Prefill()


def signed(transfer_id: str = "d/e/r/0") -> dict:
    digest = prompt_digest(PROMPT)
    return {
        "do_remote_decode": True,
        "pd_transfer_id": transfer_id,
        "pd_prompt_digest": digest,
        "pd_ask": SECRET.sign("ask", ask_bytes(transfer_id, digest)),
    }


# ---------------------------------------------------------------- granting


def test_a_finished_prompt_is_leased_with_a_signed_handoff(p: Prefill):
    handoff = from_kv_transfer_params(p.finish(params=signed()))
    verify_handoff(handoff, SECRET)
    assert (handoff.transfer_id, handoff.port, handoff.num_tokens) == ("d/e/r/0", 77, len(PROMPT))
    assert handoff.prompt_digest == prompt_digest(PROMPT)
    assert handoff.block_ids == ((5, 6, 0, 7),)
    assert handoff.lease_ms == 30000


def test_blocks_are_referenced_at_the_grant_and_freed_once_after_release_by_all_ranks(p: Prefill):
    handoff = from_kv_transfer_params(p.finish())
    assert p.references() == [5, 6, 7]  # never the null block
    ident = {"lease_id": handoff.lease_id, "transfer_id": handoff.transfer_id, "rank": 0, "num_ranks": 1}
    assert p.ask(p.half.on_renew, LeaseRenew(**ident)).held
    assert p.ask(p.half.on_release, LeaseRelease(**ident)).held
    assert p.references() == [5, 6, 7], "only the engine's thread touches the pool"
    assert p.wakes == 1
    p.half.free_ended()
    p.half.free_ended()
    assert (p.references(), sorted(p.pool.freed)) == ([], [5, 6, 7])
    assert p.stats.totals()["leases_released"] == 1


def test_a_lease_that_runs_out_wakes_the_engine_and_is_freed(p: Prefill):
    p.finish()
    p.now = 31.0
    p.half.tick()
    assert p.wakes == 1
    p.half.free_ended()
    assert p.references() == []
    assert p.stats.totals()["leases_expired"] == 1
    p.half.tick()
    assert p.wakes == 1, "an engine with nothing to free is left asleep"


def test_a_cancel_that_comes_first_refuses_the_lease_and_touches_nothing(p: Prefill):
    p.ask(p.half.on_cancel, CancelTransfer(transfer_id="d/e/r/0"))
    assert p.finish(params=signed()) is None
    assert p.references() == []
    assert p.stats.totals()["leases_denied"] == 1


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_a_request_that_did_not_end_well_is_not_leased(p: Prefill, status: str):
    assert p.finish(status=status) is None
    assert p.references() == []


def test_other_requests_are_not_leased(p: Prefill):
    assert p.finish(params={}) is None
    assert p.finish(params={"do_remote_prefill": True}) is None
    assert p.references() == []


@pytest.mark.parametrize("values", [{"prompt": None}, {"resumable": True}], ids=["prompt_embeds", "streaming_input"])
def test_kv_that_token_ids_do_not_determine_is_not_leased(p: Prefill, values):
    assert p.finish(**values) is None
    assert p.references() == []
    assert p.stats.totals()["leases_denied"] == 1


def test_an_exception_costs_one_answer_its_handoff_not_the_engine(p: Prefill):
    assert p.finish(block_ids=((1000,),)) is None  # a block that the pool does not have
    assert p.finish(params={"do_remote_decode": True, "pd_transfer_id": "\ud800"}) is not None
    assert p.references() == [5, 6, 7]


# ---------------------------------------------------------------- who asked


def test_leases_that_nobody_signed_for_hold_at_most_their_share(p: Prefill):
    blocks = [tuple(range(1, 5)), tuple(range(5, 9)), tuple(range(9, 13))]  # 12 of 20, half are allowed
    granted = [p.finish(block_ids=(ids,)) is not None for ids in blocks]
    assert granted == [True, True, False]
    assert p.references() == list(range(1, 9))
    assert p.finish(block_ids=((13, 14, 15, 16),), params=signed()) is not None


def test_the_share_is_free_again_only_when_the_blocks_are(p: Prefill):
    p.finish(block_ids=(tuple(range(1, 11)),))
    p.now = 31.0
    p.half.tick()
    assert p.finish(block_ids=((11,),)) is None
    p.half.free_ended()
    assert p.finish(block_ids=((11,),)) is not None


@pytest.mark.parametrize("token", ["", "00", "\ud800"])
def test_an_unsigned_ask_gets_an_id_of_ours(p: Prefill, token: str):
    """Else a client could name, and so end, the transfer of another one."""
    params = {"do_remote_decode": True, "pd_transfer_id": "d/e/r/0", "pd_ask": token}
    first = from_kv_transfer_params(p.finish(params=params))
    second = from_kv_transfer_params(p.finish(params=params, block_ids=((8,),)))
    assert len({"d/e/r/0", first.transfer_id, second.transfer_id}) == 3


def test_a_digest_that_nobody_signed_is_computed_here(p: Prefill):
    """Else a client could have a handoff signed for a prompt that was not computed."""
    params = {**signed(), "pd_prompt_digest": prompt_digest([9])}
    handoff = from_kv_transfer_params(p.finish(params=params))
    assert handoff.transfer_id != "d/e/r/0"
    assert handoff.prompt_digest == prompt_digest(PROMPT)


# ---------------------------------------------------------------- hello


def hello(**changes) -> Hello:
    values = {"wire_version": WIRE_VERSION, "engine_id": "pd-d", "epoch": "e7", "record": RECORD, **changes}
    return Hello(**values)


def test_a_decode_engine_with_an_equal_record_learns_where_the_ranks_are(p: Prefill):
    answer = p.ask(p.half.on_hello, hello())
    assert isinstance(answer, HelloReply)
    assert (answer.engine_id, answer.epoch) == ("pd-prefill", "e0")
    assert answer.ranks == p.half.ranks
    assert p.half.seen_peers == {"pd-d": "e7"}


def test_a_hello_before_the_ranks_are_known_waits_to_be_asked_again(p: Prefill):
    """An answer without ranks would be kept, and every pull would fail."""
    ranks, p.half.ranks = p.half.ranks, ()
    answers: list = []
    p.half.on_hello(hello(), SimpleNamespace(send=answers.append))
    assert answers == []
    p.half.ranks = ranks
    assert isinstance(p.ask(p.half.on_hello, hello()), HelloReply)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (hello(wire_version=WIRE_VERSION + 1), "wire_version"),
        (hello(record={**RECORD, "dtype": "bfloat16"}), "dtype"),
        (hello(record={**RECORD, "transports": ["rdma"]}), "transports"),
    ],
)
def test_a_decode_engine_that_differs_is_refused_by_field_and_not_listed(p: Prefill, message: Hello, field: str):
    answer = p.ask(p.half.on_hello, message)
    assert isinstance(answer, Refused)
    assert answer.field == field
    assert answer.ours != answer.theirs
    assert p.half.seen_peers == {}


def test_decode_engines_of_the_past_do_not_pile_up(p: Prefill, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_SEEN_PEERS", 2)
    for name in ("a", "b", "a", "c"):
        p.ask(p.half.on_hello, hello(engine_id=name))
    assert list(p.half.seen_peers) == ["a", "c"]
