# SPDX-License-Identifier: Apache-2.0
"""Nodes and peers that end with their test."""

from __future__ import annotations

import pytest

from tests.contract.implementation import LLMDataDist
from tests.unit.datadist.datadist_peer import Node, Peer


@pytest.fixture(scope="session", autouse=True)
def _no_spare_peers_stay():
    yield
    Peer.kill_spares()


@pytest.fixture
def make_node():
    """Node(...) in this process, finalised at the end; at most one at a time."""
    yield lambda **cluster: Node(**{"cluster_id": 1, "listen": False, **cluster})
    if LLMDataDist.llm_engine_instance is not None:
        LLMDataDist.llm_engine_instance.finalize()


@pytest.fixture
def make_peer():
    """Peer(...) in a process of its own, killed at the end."""
    peers: list[Peer] = []

    def make(**cluster):
        peers.append(Peer(**{"cluster_id": 2, **cluster}))
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()
