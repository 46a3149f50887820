# SPDX-License-Identifier: Apache-2.0
"""Checks of values: each fault alone in a table that is right otherwise, and all in one run; and against a host."""

from __future__ import annotations

import json

import pytest

from tests.unit.ascend.replay import build, read_recording, replay
from tests.unit.ascend.tables import address
from vllm_ascend_pd.ascend.devices import discover, inventory
from vllm_ascend_pd.ascend.ranktable import from_devices, groups_table, read_table, roles_table, write_table
from vllm_ascend_pd.ascend.ranktable.check import check_text
from vllm_ascend_pd.ascend.ranktable.check_host import check_host

A2 = [address(server, physical) for server in (1, 2) for physical in (0, 1)]
A3 = [address(server, physical, a3=True, pod=server) for server in (1, 2) for physical in (0, 1)]


def broken(table, path, value):
    """The table's text with one value replaced; `None` removes it."""
    content = json.loads(write_table(table))
    holder = content
    for step in path[:-1]:
        holder = holder[step]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(content, indent=2)


FIRST = ("server_list", 0, "device", 0)
SECOND = ("server_list", 0, "device", 1)
OTHER = ("server_list", 1, "device", 0)
FAULTS = [
    (A2, ("version",), "2.0", "version", "is '2.0', known are 1.0 and 1.2"),
    (A2, ("status",), "initializing", "status", "has not finished"),
    (A2, (*FIRST, "device_id"), "x", "server_list[0].device[0].device_id", "is 'x'"),
    (A2, (*FIRST, "device_id"), "-1", "server_list[0].device[0].device_id", "is '-1'"),
    (A2, (*FIRST, "device_id"), "٣", "server_list[0].device[0].device_id", "is '٣'"),
    (A2, (*SECOND, "device_id"), "0", "server_list[0].device[1].device_id", "'0' is there twice (also on line 10)"),
    (A2, (*OTHER, "device_ip"), "192.0.1.2", "server_list[1].device[0].device_ip", "'192.0.1.2' is there twice"),
    (A2, (*OTHER, "device_ip"), "192.0.1.256", "server_list[1].device[0].device_ip", "is '192.0.1.256'"),
    (A2, (*OTHER, "device_ip"), "0.0.0.0", "server_list[1].device[0].device_ip", "is '0.0.0.0'"),
    (A2, (*OTHER, "device_ip"), None, "server_list[1].device[0].device_ip", "is missing: links between servers"),
    (A2, (*OTHER, "rank_id"), "1", "server_list[1].device[0].rank_id", "'1' is there twice"),
    (A2, (*OTHER, "rank_id"), "7", "server_list[1].device[0].rank_id", "is 7 in a group of 4; rank 2 is missing"),
    (A2, (*OTHER, "rank_id"), None, "server_list[1].device[0].rank_id", "is missing on 1 devices"),
    (A2, (*OTHER, "device_port"), "70000", "server_list[1].device[0].device_port", "is '70000'"),
    (A2, (*OTHER, "device_port"), "0", "server_list[1].device[0].device_port", "is '0'"),
    (A2, (*OTHER, "super_device_id"), "5", "server_list[1].device[0].super_device_id", "is of an A3, but the version"),
    (A2, ("server_list", 1, "server_id"), "198.51.100.1", "server_list[1].server_id", "is there twice (also on line 7"),
    (A2, ("server_list", 1, "host_ip"), "node7", "server_list[1].host_ip", "is 'node7'"),
    (A3, ("version",), "1.0", "server_list[0].device[0].super_device_id", "is of an A3, but the version is 1.0"),
    (A3, (*OTHER, "super_device_id"), None, "server_list[1].device[0].super_device_id", "is missing on NPU 0 of"),
    (A3, ("super_pod_list", 1), None, "server_list[1].device[0].super_pod_list", "no super pod for NPU 0 of"),
    (A3, (*SECOND, "super_device_id"), "256", "server_list[0].device[1].super_device_id", "'256' is there twice"),
]


@pytest.mark.parametrize(("devices", "path", "value", "field", "message"), FAULTS)
def test_a_fault_is_said_with_its_line_and_field(devices, path, value, field, message):
    text = broken(from_devices(devices), path, value)
    failures = [problem for problem in check_text(text).problems if problem.level == "fail"]
    found = [problem for problem in failures if problem.field == field and message in problem.message]
    assert found, failures
    assert all(problem.action for problem in failures)
    if value is not None and path[-1] == field.rpartition(".")[2]:
        assert json.dumps(value) in text.splitlines()[found[0].line - 1]


def test_all_faults_are_found_in_one_run_in_the_order_of_lines():
    content = json.loads(write_table(from_devices(A2)))
    content["server_count"] = "9"
    content["server_list"][0]["device"][0]["device_ip"] = "nowhere"
    content["server_list"][1]["device"][1]["rank_id"] = "0"
    problems = check_text(json.dumps(content, indent=2)).problems
    assert [problem.field.rpartition(".")[2] for problem in problems] == ["server_count", "device_ip", "rank_id"]
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


def test_one_device_for_prefill_and_decode_is_a_fault():
    text = broken(roles_table(A2[:2], A2[2:]), ("decode_device_list", 0, "server_id"), "198.51.100.1")
    fields = [(problem.level, problem.field) for problem in check_text(text).problems]
    assert fields == [("fail", "decode_device_list[0].device_id")]


def test_a_cluster_id_is_unique_in_the_file():
    text = broken(roles_table(A2[:2], A2[2:]), ("decode_device_list", 1, "cluster_id"), "1")
    (problem,) = check_text(text).problems
    assert (problem.field, problem.message) == (
        "decode_device_list[1].cluster_id",
        "'1' is there twice (also on line 10)",
    )


def test_ranks_of_groups_count_within_their_group():
    table = groups_table("r", A2[:2], A2[2:])
    assert check_text(write_table(table)).problems == []
    text = broken(table, ("server_group_list", 2, "server_list", 0, "device", 1, "rank_id"), "0")
    assert ["'0' is there twice" in problem.message for problem in check_text(text).problems] == [True]


def test_a_group_that_is_there_twice_is_a_fault():
    text = broken(groups_table("r", A2[:2], A2[2:]), ("server_group_list", 2, "group_id"), "1")
    assert any("group '1' is there twice" in problem.message for problem in check_text(text).problems)


def test_addresses_may_repeat_in_another_super_pod():
    text = broken(from_devices(A3), (*OTHER, "device_ip"), "192.0.1.1")
    assert check_text(text).problems == []


def test_a_pair_table_of_version_1_2_without_super_ids_is_a_warning():
    (problem,) = check_text(broken(from_devices(A2), ("version",), "1.2")).problems
    assert (problem.level, problem.field, problem.line) == ("warn", "version", 2)


def test_a_super_device_id_as_device_id_is_a_warning():
    (problem,) = check_text(broken(from_devices(A2), (*FIRST, "device_id"), "16777216")).problems
    assert (problem.level, problem.field) == ("warn", "server_list[0].device[0].device_id")


def test_one_server_needs_no_addresses():
    assert check_text(broken(from_devices(A2[:2]), (*FIRST, "device_ip"), None)).problems == []


# ---------------------------------------------------------------- against a host


def test_a_table_of_this_host_is_right(tmp_path):
    for name in ("a2-host", "a2-container", "a3-host", "a3-container"):
        system = replay(name, tmp_path / name)
        devices = discover(system)
        table = read_table(write_table(from_devices(devices)))
        assert check_host(table, inventory(system), {devices[0].server_id}) == []


def host_problems(name, tmp_path, change, path):
    system = replay(name, tmp_path)
    devices = discover(system)
    table = read_table(broken(from_devices(devices), path, change))
    return check_host(table, inventory(system), {devices[0].server_id})


def test_a_device_that_is_not_here_is_a_fault(tmp_path):
    (problem,) = host_problems("a2-host", tmp_path, "9", (*FIRST, "device_id"))
    assert problem.message == "server '198.51.100.11' has no NPU 9; here are 0, 1, 2, 3, 4, 5, 6, 7"
    assert (problem.level, problem.line) == ("fail", 10)


def test_container_numbers_in_a_table_are_recognised(tmp_path):
    (problem,) = host_problems("a2-container", tmp_path, "0", (*FIRST, "device_id"))
    assert "here are 4, 7 (this container counts from 0; the table needs the host's numbers)" in problem.message


def test_an_old_address_is_a_fault(tmp_path):
    (problem,) = host_problems("a2-host", tmp_path, "192.0.2.77", (*FIRST, "device_ip"))
    assert problem.message.startswith("is 192.0.2.77, the driver says 192.0.2.10:")


def test_an_old_super_device_id_is_a_fault(tmp_path):
    (problem,) = host_problems("a3-host", tmp_path, "12", (*FIRST, "super_device_id"))
    assert problem.message.startswith("is 12, the driver says 16777216:")


def test_an_a3_without_super_ids_is_a_fault_on_an_a3(tmp_path):
    system = replay("a3-host", tmp_path)
    plain = [
        type(device)(
            server_id=device.server_id,
            logical_id=device.logical_id,
            physical_id=device.physical_id,
            device_ip=device.device_ip,
        )
        for device in discover(system)
    ]
    table = read_table(write_table(from_devices(plain)))
    problems = check_host(table, inventory(system), {"198.51.100.21"})
    assert [problem.field for problem in problems] == ["server_list[0].device[0].super_device_id", "version"]


def test_a_table_of_other_hosts_is_a_fault(tmp_path):
    table = read_table(write_table(from_devices(A2)))
    (problem,) = check_host(table, inventory(replay("a2-host", tmp_path)), {"198.51.100.11"})
    assert "the table has 198.51.100.1, 198.51.100.2; this host has 198.51.100.11" in problem.message
    assert problem.line == 7


def test_hidden_devices_are_not_compared(tmp_path):
    recording = read_recording("a2-host")
    table = read_table(write_table(from_devices(discover(build(recording, tmp_path)))))
    recording.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    problems = check_host(table, inventory(build(recording, tmp_path)), {"198.51.100.11"})
    assert [problem.level for problem in problems] == ["warn"] * 7
