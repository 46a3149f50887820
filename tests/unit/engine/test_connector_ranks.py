# SPDX-License-Identifier: Apache-2.0
"""Every rank of either role says where it serves and how it has ordered its caches; the scheduler half is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_pd.wire import RankAddress

connector = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.datadist.connector")


@pytest.fixture(autouse=True)
def worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention backend has chosen: only a worker's process knows what."""
    monkeypatch.setattr(connector, "find_kv_layout", lambda: "HND")


def make_rank(rank: int, caches: list) -> object:
    made = object.__new__(connector.DataDistConnector)
    address = RankAddress(tp_rank=rank, cluster_id=rank + 7, host="127.0.0.1", port=0)
    made.worker = SimpleNamespace(address=address, caches_record=caches)
    return made.get_handshake_metadata()


def test_the_scheduler_half_gets_addresses_and_orders_by_rank():
    told: list = []
    half = object.__new__(connector.DataDistConnector)
    half.half = SimpleNamespace(set_ranks=lambda *values: told.append(values))
    half.set_xfer_handshake_metadata({1: make_rank(1, [{"b": 1}]), 0: make_rank(0, [{"a": 1}])})
    ((addresses, caches, kv_layouts),) = told
    assert [address.tp_rank for address in addresses] == [0, 1]
    assert caches == [[{"a": 1}], [{"b": 1}]]
    assert kv_layouts == ["HND", "HND"]


def test_a_rank_that_has_registered_nothing_yet_says_nothing():
    made = object.__new__(connector.DataDistConnector)
    made.worker = SimpleNamespace(address=None, caches_record=[])
    assert made.get_handshake_metadata() is None


def test_the_handshake_tells_the_layout_that_the_workers_use_not_that_of_the_schedulers_process():
    """With workers in processes of their own, vLLM 0.23.0's engine core does not know it (found on `ascend-cpu`)."""
    from vllm_ascend_pd.engine.scheduler import SchedulerHalf

    half = object.__new__(SchedulerHalf)
    half.prefill, half._record = None, {"layout": {}, "kv_layout": ""}
    half.set_ranks((), [[], []], ["HND", "HND"])
    assert half._record["kv_layout"] == "HND"
    half.set_ranks((), [[], []], ["HND", "NHD"])
    assert half._record["kv_layout"] == "HND+NHD"
