# SPDX-License-Identifier: Apache-2.0
"""What CANN's package has and our engine has not: the hixl backend, releases, memory that only links refuse (§1, §6).

Over the stand-in alone. It shows what our client has to live with; that CANN does so is taken from the reference.
"""

from __future__ import annotations

import pytest

from tests.contract.implementation import (
    DIRECT,
    RELEASE,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMStatusCode,
    only,
    since,
    status_of,
)
from tests.unit.datadist.datadist_peer import holds, pull_status

pytestmark = only("stub", "our engine has no such backend, and refuses it by name")

OK = LLMStatusCode.LLM_SUCCESS
HIXL = {"llm.LocalCommRes": "", "llm.TransferBackend": "hixl"}
DESC = CacheDesc(1, [4, 8], DataType.DT_INT8)
has_hixl = since("9.0.0", "that backend")


@has_hixl
def test_the_hixl_backend_needs_a_listen_address_and_turns_direct_mode_on(engine):
    assert status_of(lambda: engine.init(dict(HIXL))) == "LLM_PARAM_INVALID"
    engine.init({**HIXL, "llm.listenIpInfo": "127.0.0.1:0"})
    assert engine.cache_manager is not None
    assert engine.standin_port is None  # port 0: a client


@has_hixl
def test_two_sided_links_are_not_enabled_under_hixl(engine):
    engine.init({**HIXL, "llm.listenIpInfo": "127.0.0.1:0"})
    for call in (
        lambda: engine.link("x", {1: 0, 2: 1}, "{}"),
        lambda: engine.unlink(1),
        lambda: engine.query_register_mem_status(1),
    ):
        assert status_of(call) == "LLM_FEATURE_NOT_ENABLED"


@has_hixl
def test_only_the_side_that_linked_may_transfer_under_hixl(make_node, make_peer, free_port):
    peer = make_peer(address=f"127.0.0.1:{free_port}", options=HIXL)
    node = make_node(listen=True, options=HIXL)
    assert node.link(2, peer.port) == OK
    node.pull(2, [3], [4])
    assert holds(node, 2, 3, 4)
    assert peer.call("pull", 1, [1], [1]) == "LLM_NOT_YET_LINK"
    assert node.unlink(2, force=False) == OK  # no address is needed, and it ends here only
    assert pull_status(node, 2, [1], [1]).name == "LLM_NOT_YET_LINK"


@has_hixl
def test_peers_of_unlike_backends_are_not_linked(make_node, make_peer, free_port):
    peer = make_peer(address=f"127.0.0.1:{free_port}", options=HIXL)
    node = make_node()
    assert node.link(2, peer.port) != OK


def test_misaligned_memory_fails_the_link_and_not_its_registration(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    node.manager.register_blocks_cache(DESC, [(2 << 20) + 4096])
    assert node.link(2, peer.port).name == "LLM_LINK_FAILED"
    assert status_of(lambda: node.datadist.link("x", {1: 0, 2: 1}, "{}")) == "LLM_LINK_FAILED"


@pytest.mark.parametrize(("count", "code"), [(252, "LLM_SUCCESS"), (253, "LLM_LINK_FAILED")])
def test_more_regions_than_a_process_may_have_fail_the_link(make_node, make_peer, count, code):
    """The node has 4 of its own. The same region twice counts once."""
    peer, node = make_peer(), make_node()
    addresses = [(1 << 40) + index * (2 << 20) for index in range(count)]
    for model_id in (1, 2):
        desc = CacheDesc(count, [4, 8], DataType.DT_INT8)
        node.manager.register_blocks_cache(desc, addresses, BlocksCacheKey(1, model_id))
    assert node.link(2, peer.port).name == code


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ('{"version": "1.0", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}', True),
        ('{"version": "1.2", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}', False),
        ('{"version": "1.3"}', False),  # hixl's
        ("{", False),
    ],
)
def test_a_description_of_the_device_is_checked_when_a_link_is_made(make_node, make_peer, text, is_good):
    peer = make_peer()
    node = make_node(options={"llm.LocalCommRes": text})
    assert (node.link(2, peer.port) == OK) is is_good
    assert is_good or node.link(2, peer.port).name == "LLM_PARAM_INVALID"


def test_a_release_has_the_settings_that_it_has():
    names = ("transfer_backend", "local_comm_res")
    expected = {"8.2.0": [False, False], "8.5.0": [False, True]}.get(RELEASE, [True, True])
    assert [hasattr(LLMConfig, name) for name in names] == expected
    assert hasattr(LLMDataDist, "link_clusters") is (RELEASE != "8.2.0")
    is_integer = isinstance(OK, int)
    assert is_integer is (RELEASE == "9.1.0")


def test_everything_at_once_cannot_be_imported():
    with pytest.raises(ImportError):
        exec("from llm_datadist import *", {})


def test_message_mode_is_not_in_the_stand_in(engine):
    assert status_of(lambda: engine.init({"llm.EnableCacheManager": "1"})) == "LLM_FEATURE_NOT_ENABLED"
    engine.init(DIRECT)
