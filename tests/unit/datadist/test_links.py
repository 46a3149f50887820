# SPDX-License-Identifier: Apache-2.0
"""Making, losing and remaking links (datadist-api.md §1.2, §4.8): codes of link, unlink and the pulls after them."""

from __future__ import annotations

import socket
import threading
import time
from array import array

import pytest

from tests.unit.datadist.datadist_peer import BLOCK_BYTES, NUM_BLOCKS, NUM_TENSORS, holds, pull_status
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.native.plane import Moves

OK = LLMStatusCode.LLM_SUCCESS
BOTH = pytest.mark.parametrize("transport", ["auto", "tcp"])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda info: info.local_ip_info_list.clear(), LLMException),
        (lambda info: setattr(info, "_remote_cluster_id", None), TypeError),
    ],
)
def test_incomplete_cluster_info_is_refused(make_node, change, error):
    node = make_node()
    info = node.info(2, 1)
    change(info)
    with pytest.raises(error):
        node.datadist.link_clusters([info])


@pytest.mark.parametrize(
    ("clusters", "timeout", "error"),
    [
        ("x", 1, TypeError),
        (["x"], 1, TypeError),
        ([], 0, LLMException),
        ([], -1, LLMException),
        ([], 2**31, ValueError),
        ([], "1", TypeError),
    ],
)
def test_link_arguments_are_checked(make_node, clusters, timeout, error):
    node = make_node()
    with pytest.raises(error):
        node.datadist.link_clusters(clusters, timeout)
    with pytest.raises(TypeError):
        node.datadist.unlink_clusters([], force=1)


def test_no_clusters_is_invalid(make_node):
    node = make_node()
    assert node.datadist.link_clusters([]) == (LLMStatusCode.LLM_PARAM_INVALID, [])
    assert node.datadist.unlink_clusters(()) == (LLMStatusCode.LLM_PARAM_INVALID, [])


def test_one_remote_and_one_local_address_are_needed(make_node):
    node = make_node()
    no_remote, two_local = node.info(2, 1), node.info(3, 1)
    no_remote.remote_ip_info_list.clear()
    two_local.append_local_ip_info("127.0.0.1", 0)
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    assert node.datadist.link_clusters([no_remote, two_local]) == (invalid, [invalid, invalid])


def test_each_peer_has_its_own_result(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        bad = node.info(3, closed.getsockname()[1])
    refused = LLMStatusCode.LLM_LINK_FAILED
    assert node.datadist.link_clusters((bad, node.info(2, peer.port))) == (refused, [refused, OK])
    assert pull_status(node, 3, [0], [0]) is LLMStatusCode.LLM_NOT_YET_LINK


def test_silent_listener_is_a_timeout(make_node):
    node = make_node()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert node.link(2, silent.getsockname()[1], 200) is LLMStatusCode.LLM_TIMEOUT


def test_listener_that_is_something_else_fails(make_node):
    node = make_node()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer():
            sock, _ = other.accept()
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        assert node.link(2, other.getsockname()[1]) is LLMStatusCode.LLM_FAILED
        thread.join()


@pytest.mark.parametrize("secret", ["cd" * 32, ""])
def test_wrong_secret_is_refused_by_both_sides(make_node, make_peer, secret):
    peer = make_peer(secret=secret)
    node = make_node(listen=True)
    assert node.link(2, peer.port) is LLMStatusCode.LLM_LINK_FAILED
    assert peer.call("link", 1, node.port) == "LLMStatusCode.LLM_LINK_FAILED"
    assert pull_status(node, 2, [0], [0]) is LLMStatusCode.LLM_NOT_YET_LINK


def test_loopback_works_without_a_secret(make_node, make_peer):
    peer = make_peer(secret="")
    node = make_node(secret="")
    assert node.link(2, peer.port) is OK
    assert node.transport(2) == "mapped"


@BOTH
def test_second_link_is_already_link_also_when_spoiled(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node()
    assert node.link(2, peer.port) is OK
    assert node.link(2, peer.port) is LLMStatusCode.LLM_ALREADY_LINK
    assert peer.call("link", 1, peer.port) == "LLMStatusCode.LLM_ALREADY_LINK"  # it has the link, too
    assert pull_status(node, 2, [1], [1]) is OK
    peer.kill()
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_TIMEOUT
    assert node.link(2, peer.port) is LLMStatusCode.LLM_ALREADY_LINK


def test_same_peer_twice_in_one_call(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    _, results = node.datadist.link_clusters([node.info(2, peer.port)] * 2)
    assert sorted(results) == [OK, LLMStatusCode.LLM_ALREADY_LINK]


def test_both_sides_at_once_make_one_link(make_node, make_peer):
    peer = make_peer()
    node = make_node(listen=True)
    for _ in range(5):
        peer.start("link", 1, node.port)
        ours, theirs = node.link(2, peer.port), peer._answer()
        assert "LLMStatusCode.LLM_SUCCESS" in (str(ours), theirs)
        assert pull_status(node, 2, [1], [2]) is OK
        assert peer.call("pull", 1, [5], [6]) is None
        assert node.unlink(2, peer.port, False) is OK


@BOTH
def test_caches_registered_after_the_link_need_a_new_one(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node()
    node.link(2, peer.port)
    assert peer.call("register", 7) is None
    late = node.manager.register_blocks_cache(node.desc, node.addresses)
    key = node.module.BlocksCacheKey(2, 7)
    cases = [
        (key, node.cache, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (node.module.BlocksCacheKey(2), late, LLMStatusCode.LLM_NOT_YET_LINK),
    ]
    for source, destination, status in cases:
        with pytest.raises(LLMException) as failure:
            node.manager.pull_blocks(source, destination, [1], [2])
        assert failure.value.status_code is status
    assert node.unlink(2) is OK
    assert node.link(2, peer.port) is OK
    node.manager.pull_blocks(key, late, [1], [2])
    assert holds(node, 2, 1, 2)


def test_a_cache_that_the_peer_unregistered_is_gone_over_tcp(make_node, make_peer):
    peer = make_peer(transport="tcp")
    node = make_node()
    node.link(2, peer.port)
    peer.call("unregister", 1)
    assert pull_status(node, 2, [1], [2]) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert holds(node, 1, 2, 2)


@BOTH
@pytest.mark.parametrize("force", [False, True])
def test_unlink_ends_the_link_on_both_sides(make_node, make_peer, transport, force):
    peer = make_peer(transport=transport)
    node = make_node()
    node.link(2, peer.port)
    assert node.unlink(2, peer.port, force) is OK
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert peer.call("pull", 1, [1], [1]) == "LLM_NOT_YET_LINK"
    assert node.unlink(2, peer.port, force) is OK  # idempotent
    assert node.link(2, peer.port) is OK
    assert pull_status(node, 2, [1], [1]) is OK


def test_unlink_without_force_needs_the_peer(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    node.link(2, peer.port)
    info = node.info(2, peer.port)
    info.remote_ip_info_list.clear()
    assert node.datadist.unlink_clusters([info])[0] is LLMStatusCode.LLM_PARAM_INVALID
    peer.kill()
    assert node.unlink(2, peer.port, False) is LLMStatusCode.LLM_UNLINK_FAILED
    assert node.datadist.unlink_clusters([info], force=True)[0] is OK


def test_unlink_of_a_frozen_peer_times_out(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    node.link(2, peer.port)
    peer.freeze()
    assert node.datadist.unlink_clusters([node.info(2, peer.port)], 200)[0] is LLMStatusCode.LLM_TIMEOUT
    assert node.unlink(2) is OK


@BOTH
def test_peer_that_unlinked_by_force_is_not_linked_here(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node()
    node.link(2, peer.port)
    assert peer.call("unlink", 1) == "LLMStatusCode.LLM_SUCCESS"
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert node.link(2, peer.port) is LLMStatusCode.LLM_ALREADY_LINK  # force must be called on both sides
    assert node.unlink(2) is OK
    assert node.link(2, peer.port) is OK


@BOTH
def test_dead_peer_is_a_timeout_then_not_linked_then_relinks(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node(timeout_ms=60_000)
    node.link(2, peer.port)
    peer.kill()
    start = time.monotonic()
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_TIMEOUT
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert time.monotonic() - start < 10  # noticed, not waited for
    assert holds(node, 1, 1, 1)
    again = make_peer(transport=transport)
    assert node.unlink(2) is OK
    assert node.link(2, again.port) is OK
    assert pull_status(node, 2, [1], [1]) is OK


@BOTH
def test_restarted_peer_with_its_old_id_replaces_its_stale_link(make_node, make_peer, transport):
    node = make_node(listen=True, transport=transport)
    first = make_peer()
    assert first.call("link", 1, node.port) == "LLMStatusCode.LLM_SUCCESS"
    first.freeze()  # the link looks alive from here
    second = make_peer(cluster_id=2)
    assert second.call("link", 1, node.port) == "LLMStatusCode.LLM_SUCCESS"
    assert second.call("pull", 1, [5], [6]) is None
    assert pull_status(node, 2, [3], [4]) is OK
    second.kill()
    assert pull_status(node, 2, [3], [4]) is LLMStatusCode.LLM_TIMEOUT
    third = make_peer(cluster_id=2)
    assert third.call("link", 1, node.port) == "LLMStatusCode.LLM_SUCCESS"
    assert pull_status(node, 2, [3], [4]) is OK


def test_orderly_end_of_the_peer_is_not_a_timeout(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    node.link(2, peer.port)
    peer.call("finalize")
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK


def test_peer_killed_in_the_middle_of_a_transfer(make_node, make_peer):
    """The peer stands still, so the pull is under way for as long as we like; then it dies."""
    peer = make_peer(transport="tcp")
    node = make_node(timeout_ms=60_000)
    node.link(2, peer.port)
    peer.freeze()
    results = []
    thread = threading.Thread(target=lambda: results.append(pull_status(node, 2, [1], [1])))
    thread.start()
    while not node.datadist._engine.get_link(2)._mutex.locked():
        thread.join(0.001)
    start = time.monotonic()
    peer.kill()
    thread.join(10)
    assert results == [LLMStatusCode.LLM_TIMEOUT]
    assert time.monotonic() - start < 10


def test_timeout_spoils_the_link_until_it_is_made_anew(make_node, make_peer):
    peer = make_peer(transport="tcp")
    node = make_node(timeout_ms=300)
    node.link(2, peer.port)
    peer.freeze()
    start = time.monotonic()
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_TIMEOUT
    assert 0.3 <= time.monotonic() - start < 5
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    peer.process.send_signal(18)  # SIGCONT: it is well again, the link is not
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert node.unlink(2) is OK
    assert node.link(2, peer.port) is OK
    assert pull_status(node, 2, [1], [1]) is OK
    assert holds(node, 2, 1, 1)


def test_waiting_for_the_link_counts_against_the_timeout(make_node, make_peer):
    peer = make_peer()
    node = make_node(timeout_ms=300)
    node.link(2, peer.port)
    link = node.datadist._engine.get_link(2)
    with link.transfer(time.monotonic() + 1):
        assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_TIMEOUT
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert holds(node, 1, 1, 1)


@BOTH
def test_deadline_that_passes_before_the_bytes_have_come_spoils_the_link(make_node, make_peer, transport):
    peer = make_peer(transport=transport)
    node = make_node()
    node.link(2, peer.port)
    link = node.datadist._engine.get_link(2)
    ids = array("q", range(NUM_BLOCKS))
    moves = Moves(0, 0, NUM_TENSORS, ids, ids, BLOCK_BYTES, BLOCK_BYTES)
    now = time.monotonic()
    with link.transfer(now + 5), pytest.raises(LLMException) as failure:
        link.read(link.entries[0], node.cache.cache_id, moves, now)
    assert failure.value.status_code is LLMStatusCode.LLM_TIMEOUT
    assert pull_status(node, 2, [1], [1]) is LLMStatusCode.LLM_NOT_YET_LINK


def test_switch_role_is_refused_while_linked(make_node, make_peer):
    peer = make_peer()
    node = make_node()
    node.link(2, peer.port)
    with pytest.raises(LLMException) as failure:
        node.datadist.switch_role(node.module.LLMRole.PROMPT)
    assert failure.value.status_code is LLMStatusCode.LLM_EXIST_LINK
    node.unlink(2)
    node.datadist.switch_role(node.module.LLMRole.PROMPT)
