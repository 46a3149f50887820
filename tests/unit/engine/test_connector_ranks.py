# SPDX-License-Identifier: Apache-2.0
"""Every rank of either role says where it serves and how it has ordered its caches; the scheduler half is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_pd.wire import RankAddress

connector = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.datadist.connector")


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
    ((addresses, caches),) = told
    assert [address.tp_rank for address in addresses] == [0, 1]
    assert caches == [[{"a": 1}], [{"b": 1}]]


def test_a_rank_that_has_registered_nothing_yet_says_nothing():
    made = object.__new__(connector.DataDistConnector)
    made.worker = SimpleNamespace(address=None, caches_record=[])
    assert made.get_handshake_metadata() is None
