# SPDX-License-Identifier: Apache-2.0
"""Two-sided links by rank table (datadist-api.md §1.3, §5)."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.contract.implementation import DIRECT, CacheDesc, DataType, LLMRole, RegisterMemStatus, only, status_of
from tests.unit.datadist.datadist_peer import holds, pull_status

TWO = {1: 0, 2: 1}
DESC = CacheDesc(1, [4, 8], DataType.DT_INT8)
OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED


def free_ports(count):
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in with_sockets]
    for sock in with_sockets:
        sock.close()
    return ports


def make_device(rank, port):
    return {"device_id": str(rank), "device_ip": "10.0.0.1", "device_port": str(port), "rank_id": str(rank)}


def make_table(ports, version="1.2"):
    devices = [make_device(rank, port) for rank, port in enumerate(ports)]
    server = {"server_id": "1", "host_ip": "127.0.0.1", "device": devices}
    return {"version": version, "status": "completed", "server_count": "1", "server_list": [server]}


@pytest.fixture
def table():
    """Of two ranks on free ports of this machine."""
    return json.dumps(make_table(free_ports(2)))


def wait_status(query, *unfinished):
    deadline = time.monotonic() + 20
    while (status := query()) in (PREPARING, "PREPARING", *unfinished):
        assert time.monotonic() < deadline
        time.sleep(0.005)  # as clients poll it
    return status


def link_both(node, peer, name, table, members=((1, 0), (2, 1))):
    """The comm ids of both sides."""
    theirs = peer.call("comm", name, members, table)
    ours = node.datadist.link(name, dict(members), table)
    assert wait_status(lambda: node.datadist.query_register_mem_status(ours)) is OK
    assert wait_status(lambda: peer.call("comm_status", theirs)) == "OK"
    return ours, theirs


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((5, TWO, ""), TypeError),
        ((None, TWO, ""), TypeError),
        (("x", [1, 2], ""), TypeError),
        (("x", {"1": 0, 2: 1}, ""), TypeError),
        (("x", {1: "0", 2: 1}, ""), TypeError),
        (("x", TWO, {}), TypeError),
        (("x", {-1: 0, 2: 1}, ""), ValueError),
        (("x", {2**64: 0, 2: 1}, ""), ValueError),
        (("x", {1: 0, 2: -1}, ""), ValueError),
        (("x", {1: 0, 2: 2**32}, ""), ValueError),
    ],
)
def test_link_checks_its_types(engine, args, error):
    engine.init(DIRECT)
    with pytest.raises(error):
        engine.link(*args)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("", TWO),
        ("x" * 128, TWO),
        ("x", {1: 0}),
        ("x", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}),
        ("x", {1: 1, 2: 0}),  # ranks must ascend
        ("x", {1: 0, 2: 0}),
        ("x", {2: 0, 3: 1}),  # without this cluster
    ],
)
def test_link_refuses_members_that_make_no_sense(engine, table, name, members):
    engine.init(DIRECT)
    assert status_of(lambda: engine.link(name, members, table)) == "LLM_PARAM_INVALID"
    assert status_of(lambda: engine.query_register_mem_status(1)) == "LLM_NOT_YET_LINK"


def change(**fields):
    return lambda table: table.update(fields)


def change_device(**fields):
    return lambda table: table["server_list"][0]["device"][1].update(fields)


def change_server(**fields):
    return lambda table: table["server_list"][0].update(fields)


@pytest.mark.parametrize(
    "edit",
    [
        change(version="1.3"),
        change(version=1.2),
        change(version=None),
        change(status="initializing"),
        change(server_count="2"),
        change(server_count=1),
        change(server_list=[]),
        change(server_list={}),
        change_server(server_id=1),
        change_server(device=[{}]),
        change_server(host_ip="fe80::1"),
        change_device(rank_id="0"),  # twice
        change_device(rank_id="2"),  # a member has none
        change_device(rank_id=1),
        change_device(rank_id="one"),
        change_device(device_id=None),
        change_device(device_port="0"),
        change_device(device_port="65536"),
        change_device(device_port=80),
        change_device(super_device_id=5),
    ],
)
def test_a_table_without_a_communicator_fails_the_link(engine, edit):
    engine.init(DIRECT)
    table = make_table(free_ports(2))
    edit(table)
    assert status_of(lambda: engine.link("x", TWO, json.dumps(table))) == "LLM_LINK_FAILED"


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000])
def test_a_table_that_is_no_object_fails_the_link(engine, text):
    engine.init(DIRECT)
    assert status_of(lambda: engine.link("x", TWO, text)) == "LLM_LINK_FAILED"


def test_version_1_0_needs_device_addresses(engine):
    engine.init(DIRECT)
    table = make_table(free_ports(2), "1.0")
    engine.link("x", TWO, json.dumps(table))
    del table["server_list"][0]["device"][1]["device_ip"]
    assert status_of(lambda: engine.link("y", TWO, json.dumps(table))) == "LLM_LINK_FAILED"
    table["version"] = "1.2"
    engine.link("y", TWO, json.dumps(table))


@pytest.mark.parametrize(
    ("server", "device"),
    [
        ({"server_id": "127.0.0.1", "host_ip": None}, {}),
        ({"server_id": "host-a", "host_ip": None}, {"device_ip": "127.0.0.1"}),
    ],
)
def test_the_meeting_place_is_the_first_address_of_a_rank(engine, server, device):
    engine.init(DIRECT)
    table = make_table(free_ports(2))
    table["server_list"][0].update(server)
    for entry in table["server_list"][0]["device"]:
        entry.update(device)
    engine.link("x", TWO, json.dumps(table))
    port = int(table["server_list"][0]["device"][0]["device_port"])
    socket.create_connection(("127.0.0.1", port)).close()


def test_without_a_port_ranks_meet_from_16666_on(engine):
    engine.init(DIRECT)
    table = make_table([1, 2])
    for entry in table["server_list"][0]["device"]:
        del entry["device_port"]
    engine.link("x", TWO, json.dumps(table))
    socket.create_connection(("127.0.0.1", 16666)).close()


def test_a_taken_address_fails_the_link(engine):
    engine.init(DIRECT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        table = json.dumps(make_table([taken.getsockname()[1], *free_ports(1)]))
        assert status_of(lambda: engine.link("x", TWO, table)) == "LLM_LINK_FAILED"


def test_comm_ids_count_from_one_and_start_again_with_the_engine(engine, table):
    for _ in range(2):
        engine.init(DIRECT)
        first = engine.link("a", TWO, table)
        engine.unlink(first)
        assert (first, engine.link("b", TWO, table)) == (1, 2)
        engine.finalize()


def test_at_most_512_comms(engine, table):
    engine.init(DIRECT)
    ids = [engine.link(f"comm {number}", TWO, table) for number in range(512)]
    assert ids == list(range(1, 513))
    assert status_of(lambda: engine.link("one more", TWO, table)) == "LLM_PARAM_INVALID"
    engine.unlink(7)
    assert engine.link("one more", TWO, table) == 513


@pytest.mark.parametrize("verb", ["unlink", "query_register_mem_status"])
def test_unknown_comms_are_not_linked(engine, table, verb):
    engine.init(DIRECT)
    call = getattr(engine, verb)
    assert status_of(lambda: call(1)) == "LLM_NOT_YET_LINK"
    engine.unlink(engine.link("x", TWO, table))
    assert status_of(lambda: call(1)) == "LLM_NOT_YET_LINK"
    for bad in (None, "1"):
        with pytest.raises(TypeError):
            call(bad)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("members", [[(1, 0), (2, 1)], [(2, 0), (1, 1)]])
def test_a_link_is_preparing_until_the_peer_comes_and_then_works_both_ways(make_node, make_peer, members, transport):
    table = json.dumps(make_table(free_ports(2)))
    peer = make_peer(transport=transport)
    node = make_node()
    ours = node.datadist.link("x", dict(members), table)
    assert ours == 1
    assert node.datadist.query_register_mem_status(ours) is PREPARING
    assert pull_status(node, 2, [3], [4]).name == "LLM_NOT_YET_LINK"
    theirs = peer.call("comm", "x", members, table)
    assert wait_status(lambda: node.datadist.query_register_mem_status(ours)) is OK
    assert wait_status(lambda: peer.call("comm_status", theirs)) == "OK"
    node.pull(2, [3], [4])
    assert holds(node, 2, 3, 4)
    assert peer.call("pull", 1, [5], [6]) is None
    assert all(peer.call("check", 1, 5, 6))


def test_three_members_are_linked_in_full(make_node, make_peer):
    table = json.dumps(make_table(free_ports(3)))
    members = [(1, 0), (2, 1), (3, 2)]
    peers = [make_peer(), make_peer(cluster_id=3)]
    node = make_node()
    ids = [peer.call("comm", "x", members, table) for peer in peers]
    ours = node.datadist.link("x", dict(members), table)
    assert wait_status(lambda: node.datadist.query_register_mem_status(ours)) is OK
    assert [wait_status(lambda p=peer, c=comm: p.call("comm_status", c)) for peer, comm in zip(peers, ids, strict=True)]
    node.pull(3, [3], [4])
    assert peers[0].call("pull", 3, [5], [6]) is None
    assert peers[1].call("pull", 2, [5], [6]) is None


def test_a_member_that_does_not_come_fails_the_link_in_time(make_node, make_peer):
    node = make_node(options={"llm.LinkTotalTime": "1", "llm.LinkRetryCount": "3"})
    start = time.monotonic()
    comm = node.datadist.link("x", TWO, json.dumps(make_table(free_ports(2))))
    assert wait_status(lambda: node.datadist.query_register_mem_status(comm)) is FAILED
    assert 0.9 < time.monotonic() - start < 10
    assert node.datadist.query_register_mem_status(comm) is FAILED  # until it is unlinked
    assert pull_status(node, 2, [1], [1]).name == "LLM_NOT_YET_LINK"
    node.datadist.unlink(comm)


def test_members_with_unlike_tables_fail_both(make_node, make_peer):
    ports = free_ports(3)
    node, peer = make_node(), make_peer()
    theirs = peer.call("comm", "x", [(1, 0), (2, 1)], json.dumps(make_table(ports)))
    ours = node.datadist.link("x", TWO, json.dumps(make_table([ports[2], ports[1]])))
    assert wait_status(lambda: node.datadist.query_register_mem_status(ours)) is FAILED
    assert wait_status(lambda: peer.call("comm_status", theirs)) == "FAILED"


@only("host", "CANN's package knows no secret")
def test_a_member_with_another_secret_fails_the_link(make_node, make_peer, table):
    node, peer = make_node(), make_peer(secret="cd" * 32, options={"llm.LinkTotalTime": "1"})
    theirs = peer.call("comm", "x", [(1, 0), (2, 1)], table)
    ours = node.datadist.link("x", TWO, table)
    assert wait_status(lambda: node.datadist.query_register_mem_status(ours)) is FAILED
    assert wait_status(lambda: peer.call("comm_status", theirs)) == "FAILED"


def test_unlink_ends_the_preparation_at_once_and_frees_the_address(make_node, table):
    node = make_node()
    start = time.monotonic()
    for _ in range(2):
        node.datadist.unlink(node.datadist.link("x", TWO, table))
    assert time.monotonic() - start < 5
    port = json.loads(table)["server_list"][0]["device"][0]["device_port"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)))


def test_unlink_ends_the_links_of_its_comm(make_node, make_peer, table):
    node, peer = make_node(), make_peer()
    ours, theirs = link_both(node, peer, "x", table)
    node.datadist.unlink(ours)
    assert pull_status(node, 2, [1], [1]).name == "LLM_NOT_YET_LINK"
    assert peer.call("pull", 1, [1], [1]) == "LLM_NOT_YET_LINK"
    assert peer.call("comm_unlink", theirs) is None
    link_both(node, peer, "x", table)
    node.pull(2, [1], [1])


def test_a_second_link_to_the_peer_replaces_the_first(make_node, make_peer, table):
    node, peer = make_node(), make_peer()
    first = link_both(node, peer, "x", table)
    second = link_both(node, peer, "y", json.dumps(make_table(free_ports(2))))
    assert (first, second) == ((1, 1), (2, 2))
    node.pull(2, [1], [1])
    node.datadist.unlink(first[0])  # the link is the second's by now
    assert peer.call("comm_unlink", first[1]) is None
    node.pull(2, [1], [1])
    node.datadist.unlink(second[0])
    assert pull_status(node, 2, [1], [1]).name == "LLM_NOT_YET_LINK"


def test_a_linked_peer_is_not_linked_while_its_next_comm_is_prepared(make_node, make_peer, table):
    node, peer = make_node(), make_peer()
    link_both(node, peer, "x", table)
    node.pull(2, [1], [1])
    comm = node.datadist.link("y", {1: 0, 2: 1, 3: 2}, json.dumps(make_table(free_ports(3))))
    assert pull_status(node, 2, [1], [1]).name == "LLM_NOT_YET_LINK"
    assert node.datadist.query_register_mem_status(comm) is PREPARING


def test_memory_cannot_be_made_accessible_after_a_link(engine, table):
    engine.init(DIRECT)
    manager = engine.cache_manager
    assert status_of(lambda: engine.link("x", TWO, "{}")) == "LLM_LINK_FAILED"
    assert status_of(lambda: manager.register_cache(DESC, [2 << 20], (), True)) == "LLM_SUCCESS"  # it was no link
    engine.link("x", TWO, table)
    for register in (manager.register_cache, manager.register_blocks_cache):
        assert status_of(lambda call=register: call(DESC, [2 << 20], remote_accessible=True)) == "LLM_PARAM_INVALID"
        assert status_of(lambda call=register: call(DESC, [3])) == "LLM_SUCCESS"  # not accessible: need not be aligned


def test_a_one_sided_link_leaves_registration_alone(make_node, make_peer):
    node, peer = make_node(), make_peer()
    node.link(2, peer.port)
    assert status_of(lambda: node.manager.register_cache(DESC, [2 << 20], (), True)) == "LLM_SUCCESS"


def test_switch_role_is_refused_while_a_comm_lives(engine, table):
    engine.init(DIRECT)
    comm = engine.link("x", TWO, table)
    assert status_of(lambda: engine.switch_role(LLMRole.MIX)) == "LLM_EXIST_LINK"
    engine.unlink(comm)
    engine.switch_role(LLMRole.MIX)


def test_finalize_ends_a_preparation(engine, table):
    engine.init(DIRECT)
    engine.link("x", TWO, table)
    start = time.monotonic()
    engine.finalize()
    assert time.monotonic() - start < 5


def test_bad_link_time_fails_init(engine):
    for value in ("-1", "x", str(2**32)):
        assert status_of(lambda v=value: engine.init({**DIRECT, "llm.LinkTotalTime": v})) == "LLM_PARAM_INVALID"
