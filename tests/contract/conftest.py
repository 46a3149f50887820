# SPDX-License-Identifier: Apache-2.0
"""Engines and peers that end with their test."""

from __future__ import annotations

import socket

import pytest

from tests.contract.implementation import DIRECT, NAME, LLMDataDist, LLMRole
from tests.unit.datadist.conftest import _no_spare_peers_stay, make_node, make_peer  # noqa: F401


@pytest.fixture(params=[NAME], autouse=True)
def implementation(request):
    """Which one is under test; shows in every test id."""
    return request.param


@pytest.fixture
def engine():
    """Not initialised; finalised at the end."""
    instance = LLMDataDist(LLMRole.PROMPT, 1)
    yield instance
    instance.finalize()


@pytest.fixture
def manager(engine):
    """The cache manager of an engine in direct mode without pools, links or a listener."""
    engine.init(DIRECT)
    return engine.cache_manager


@pytest.fixture
def free_port():
    """Of this machine, a moment ago; where port 0 has another meaning."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]
