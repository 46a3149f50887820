# SPDX-License-Identifier: Apache-2.0
"""Tables made of devices: versions, super pods, ranks; and that CANN's stand-in can read the pair table."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ascend.tables import SLOW, address, addresses
from vllm_ascend_pd.ascend.ranktable import (
    RankTableError,
    from_devices,
    groups_table,
    read_table,
    roles_table,
    write_table,
)
from vllm_ascend_pd.ascend.ranktable.check import check_table
from vllm_ascend_pd.datadist.host.rank_table import parse_rank_table


def test_two_a2_servers_make_a_table_of_version_1_0():
    table = json.loads(write_table(from_devices([address(1, 3), address(2, 5)])))
    assert table == {
        "version": "1.0",
        "server_count": "2",
        "status": "completed",
        "server_list": [
            {"server_id": "198.51.100.1", "device": [{"device_id": "3", "device_ip": "192.0.1.4", "rank_id": "0"}]},
            {"server_id": "198.51.100.2", "device": [{"device_id": "5", "device_ip": "192.0.2.6", "rank_id": "1"}]},
        ],
    }


def test_two_devices_of_one_a3_server_make_one_entry_in_one_super_pod():
    table = json.loads(write_table(from_devices([address(1, 3, a3=True), address(1, 5, a3=True)])))
    assert (table["version"], table["server_count"]) == ("1.2", "1")
    assert [device["super_device_id"] for device in table["server_list"][0]["device"]] == ["259", "261"]
    assert table["super_pod_list"] == [{"super_pod_id": "0", "server_list": [{"server_id": "198.51.100.1"}]}]


def test_servers_of_two_super_pods_make_two_entries():
    table = json.loads(write_table(from_devices([address(1, 0, a3=True, pod=7), address(2, 0, a3=True, pod=9)])))
    assert table["super_pod_list"] == [
        {"super_pod_id": "7", "server_list": [{"server_id": "198.51.100.1"}]},
        {"super_pod_id": "9", "server_list": [{"server_id": "198.51.100.2"}]},
    ]


def test_host_and_port_of_a_rank_are_written_where_they_are_given():
    table = from_devices([address(1, 0), address(2, 0)], host_ips=["203.0.113.1", ""], device_ports=[17000, 0])
    assert parse_rank_table(write_table(table)) == {0: ("203.0.113.1", 17000), 1: ("198.51.100.2", 16667)}


def test_roles_table_counts_clusters_over_both_lists():
    table = json.loads(write_table(roles_table([address(1, 0), address(1, 1)], [address(2, 0)])))
    assert [entry["cluster_id"] for entry in table["prefill_device_list"]] == ["1", "2"]
    assert table["decode_device_list"] == [
        {"server_id": "198.51.100.2", "device_id": "0", "device_ip": "192.0.2.1", "cluster_id": "3"}
    ]
    assert (table["version"], table["server_count"]) == ("1.2", "2")


def test_roles_table_of_an_a3_has_both_super_ids_per_device():
    table = json.loads(write_table(roles_table([address(1, 0, a3=True)], [address(2, 0, a3=True)])))
    entry = table["decode_device_list"][0]
    assert (entry["super_pod_id"], entry["super_device_id"]) == ("0", "512")


def test_groups_table_has_router_prefill_and_decode():
    table = read_table(write_table(groups_table("203.0.113.9", [address(1, 0)], [address(1, 1), address(2, 0)])))
    assert [(group.group_id, group.title, len(group.servers)) for group in table.groups] == [
        ("0", "router", 1),
        ("1", "prefill", 1),
        ("2", "decode", 2),
    ]
    assert [device.rank_id for group, _, device in table.rows() if group.title == "decode"] == ["0", "1"]


def test_a_device_for_two_ranks_is_refused():
    with pytest.raises(RankTableError, match=r"NPU 3 of server 198.51.100.1 is there twice; .*ASCEND_RT_VISIBLE"):
        from_devices([address(1, 3), address(1, 3)])


def test_a2_and_a3_in_one_table_are_refused():
    with pytest.raises(RankTableError, match=r"is in super pod 0, NPU 4 of server 198.51.100.2 in none; A2 and A3"):
        from_devices([address(1, 3, a3=True), address(2, 4)])


def test_no_devices_are_refused():
    with pytest.raises(RankTableError, match="at least one device"):
        from_devices([])


@settings(SLOW)
@given(data=st.data(), a3=st.booleans())
def test_tables_of_devices_are_read_back_and_have_no_problem(data, a3):
    devices = data.draw(addresses(a3))
    half = max(1, len(devices) // 2)
    for table in (
        from_devices(devices),
        roles_table(devices[:half], devices[half:]),
        groups_table("r", devices[:half], devices[half:]),
    ):
        text = write_table(table)
        again = read_table(text)
        assert again == table
        assert [problem for problem in check_table(again) if problem.level == "fail"] == []
        assert write_table(again) == text


@settings(SLOW)
@given(data=st.data(), a3=st.booleans())
def test_every_scalar_is_written_as_text(data, a3):
    devices = data.draw(addresses(a3))

    def scalars(value):
        if isinstance(value, dict):
            return [scalar for member in value.values() for scalar in scalars(member)]
        if isinstance(value, list):
            return [scalar for member in value for scalar in scalars(member)]
        return [value]

    for table in (from_devices(devices), roles_table(devices, []), groups_table("r", devices, [])):
        assert all(isinstance(scalar, str) for scalar in scalars(json.loads(write_table(table))))
