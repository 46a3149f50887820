# SPDX-License-Identifier: Apache-2.0
"""Rank tables of two devices, and which device a rank says that it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_ascend_pd.ascend.ranktable import groups_table, roles_table, write_table
from vllm_ascend_pd.datadist import Way, load, own_device, pair_table
from vllm_ascend_pd.datadist.pair_table import PairTableError, build_pair_table, digest
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.wire import DeviceAddress

CANN = SimpleNamespace(name="cann")


def device(number: int, server: str = "10.0.0.1", pod: str = "", ip: str = "10.9.0.1") -> DeviceAddress:
    sdid = f"1{number}" if pod else ""
    return DeviceAddress(
        server_id=server,
        logical_id=number,
        physical_id=number,
        device_ip=ip,
        super_device_id=sdid,
        super_pod_id=pod,
    )


def test_a2_on_two_hosts_is_a_table_of_version_1_0():
    assert json.loads(build_pair_table(device(3), device(1, "10.0.0.2", ip="10.9.0.2"))) == {
        "version": "1.0",
        "status": "completed",
        "server_count": "2",
        "server_list": [
            {"server_id": "10.0.0.1", "device": [{"device_id": "3", "device_ip": "10.9.0.1", "rank_id": "0"}]},
            {"server_id": "10.0.0.2", "device": [{"device_id": "1", "device_ip": "10.9.0.2", "rank_id": "1"}]},
        ],
    }


def test_one_host_is_one_server():
    table = json.loads(build_pair_table(device(3), device(1)))
    assert table["server_count"] == "1"
    (server,) = table["server_list"]
    assert [(entry["device_id"], entry["rank_id"]) for entry in server["device"]] == [("3", "0"), ("1", "1")]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [(("0", "0"), [("0", ["10.0.0.1", "10.0.0.2"])]), (("0", "1"), [("0", ["10.0.0.1"]), ("1", ["10.0.0.2"])])],
)
def test_a3_is_a_table_of_version_1_2_with_its_super_pods(pods, expected):
    table = json.loads(build_pair_table(device(3, pod=pods[0]), device(1, "10.0.0.2", pods[1])))
    assert table["version"] == "1.2"
    assert [entry["device"][0]["super_device_id"] for entry in table["server_list"]] == ["13", "11"]
    found = [(pod["super_pod_id"], [s["server_id"] for s in pod["server_list"]]) for pod in table["super_pod_list"]]
    assert found == expected


def scalars(value):
    if isinstance(value, dict):
        return [text for item in value.values() for text in scalars(item)]
    if isinstance(value, list):
        return [text for item in value for text in scalars(item)]
    return [value]


def test_every_scalar_is_a_text():
    table = json.loads(build_pair_table(device(3, pod="0"), device(1, "10.0.0.2", "1")))
    assert all(isinstance(text, str) for text in scalars(table))


def test_both_sides_build_the_same_text_and_other_devices_another():
    one, other = device(3), device(1, "10.0.0.2")
    assert digest(build_pair_table(one, other)) == digest(build_pair_table(device(3), device(1, "10.0.0.2")))
    assert digest(build_pair_table(one, other)) != digest(build_pair_table(other, one))


@pytest.mark.parametrize(
    ("prefill", "decode", "parts"),
    [
        (device(1), device(1), ["NPU 1", "twice"]),
        (device(1, pod="0"), device(2), ["super pod", "A2 and A3"]),
        (device(1, ip=""), device(2), ["prefill", "NPU 1", "device_ip"]),
        (device(1), device(2, server=""), ["decode", "NPU 2", "server_id"]),
        (
            device(1),
            DeviceAddress(server_id="a", logical_id=0, physical_id=0, device_ip="b", super_pod_id="0"),
            ["both"],
        ),
    ],
)
def test_devices_that_cannot_be_in_one_table_are_refused(prefill, decode, parts):
    with pytest.raises(PairTableError) as failure:
        build_pair_table(prefill, decode)
    for part in parts:
        assert part in str(failure.value)


# ---------------------------------------------------------------- one's own device


def find_one(only, require_ip):
    (index,) = only
    return [device(index, ip="10.9.0.7" if require_ip else "")]


def find_none(only, require_ip):
    raise PDError("hccn_tool is missing")


def test_on_cpu_there_is_no_device():
    assert own_device(load("host"), Way.HOST, 0, find=find_none) is None


def test_the_device_is_read_from_the_system_and_needs_its_address_for_a_rank_table_only():
    assert own_device(CANN, Way.TWO_SIDED, 2, find=find_one) == device(2, ip="10.9.0.7")
    assert own_device(CANN, Way.HIXL, 2, find=find_one) == device(2, ip="")
    assert own_device(CANN, Way.HIXL, 2, find=find_none) is None
    with pytest.raises(PDConfigError, match="the address of NPU 2 is needed: hccn_tool is missing"):
        own_device(CANN, Way.TWO_SIDED, 2, find=find_none)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A file in each format with the devices 2 (prefill) and 5 (decode) of this host, which has two names."""
    monkeypatch.setattr(pair_table, "local_addresses", lambda: {"10.0.0.1", "192.168.7.1"})
    prefill, decode = [device(2, "192.168.7.1", ip="10.8.0.2")], [device(5, "192.168.7.1", ip="10.8.0.5")]
    made = {}
    for name, table in (("roles", roles_table(prefill, decode)), ("groups", groups_table("r", prefill, decode))):
        made[name] = tmp_path / f"{name}.json"
        made[name].write_text(write_table(table))
    return made


@pytest.mark.parametrize("name", ["roles", "groups"])
def test_with_a_file_the_device_is_as_the_file_says(tables, name):
    found = own_device(CANN, Way.TWO_SIDED, 2, str(tables[name]), "prefill", find_one)
    assert found == device(2, "192.168.7.1", ip="10.8.0.2")


@pytest.mark.parametrize("name", ["roles", "groups"])
def test_a_device_of_the_other_role_or_of_nobody_is_refused(tables, name):
    with pytest.raises(PDConfigError, match="has NPU 5 under decode, but this instance is prefill"):
        own_device(CANN, Way.TWO_SIDED, 5, str(tables[name]), "prefill", find_one)
    with pytest.raises(PDConfigError, match=r"--pd-rank-table: .* does not name NPU 3 .*10\.0\.0\.1, 192\.168\.7\.1"):
        own_device(CANN, Way.TWO_SIDED, 3, str(tables[name]), "prefill", find_one)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(PDConfigError, match="No such file"):
        own_device(CANN, Way.TWO_SIDED, 2, str(path), "", find_one)
    path.write_text("[]")
    with pytest.raises(PDConfigError, match=f"--pd-rank-table: {path}"):
        own_device(CANN, Way.TWO_SIDED, 2, str(path), "", find_one)
