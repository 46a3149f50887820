# SPDX-License-Identifier: Apache-2.0
"""The NPU checks on recorded output of A2 and A3 hosts. Nothing here has run on an NPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.ascend.replay import replay
from tests.unit.doctor.hosts import make_host
from vllm_ascend_pd.ascend import devices
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.doctor.check import Check, State
from vllm_ascend_pd.doctor.checks import npu
from vllm_ascend_pd.transfer.staging.reserve import reserved_device_bytes

OK, WARN, FAIL, NA = State.OK, State.WARN, State.FAIL, State.NOT_APPLICABLE


def facts_of(recording: str, tmp_path: Path) -> npu.NpuFacts:
    """All that a recording says; some hold the questions of the inventory only."""
    system = replay(recording, tmp_path / recording)
    try:
        facts = npu.read_npus(make_host(tmp_path), system)
    except KeyError:
        facts = npu.NpuFacts(devices.inventory(system), hccn=devices.hccn_conf(system))
    assert facts is not None
    return facts


def checks_of(recording: str, tmp_path: Path) -> dict[str, Check]:
    facts = facts_of(recording, tmp_path)
    return {check.key: check for check in npu.check_npus(make_host(tmp_path, num_npus=8), facts)}


def test_a_host_without_npus_has_nothing_to_check(tmp_path: Path):
    host = make_host(tmp_path)
    assert npu.read_npus(host) is None
    (check,) = npu.check_npus(host, None)
    assert check.state is NA


@pytest.mark.parametrize(("recording", "warned"), [("a2-host", set()), ("a3-host", {"npu.hccn-conf"})])
def test_a_healthy_host_is_ok(recording: str, warned: set[str], tmp_path: Path):
    """The A3 recording has no hccn.conf, which matters between super nodes only."""
    found = checks_of(recording, tmp_path)
    assert {key for key, check in found.items() if check.state not in (OK, NA)} == warned
    assert all(found[key].state is WARN for key in warned)
    assert {"npu.devices", "npu.ids", "npu.health", "npu.network", "npu.hccn-conf", "npu.tls-switch"} <= set(found)


def test_an_alarm_fails_and_names_the_chip(tmp_path: Path):
    check = checks_of("a2-alarm", tmp_path)["npu.health"]
    assert check.state is FAIL
    assert "Alarm" in check.seen


def test_health_that_cannot_be_read_warns(tmp_path: Path):
    facts = facts_of("a2-host", tmp_path)
    unread = tuple(dataclasses.replace(chip, status="", detail="`npu-smi` failed") for chip in facts.health)
    (check,) = [
        c for c in npu.check_npus(make_host(tmp_path), dataclasses.replace(facts, health=unread)) if c.name == "health"
    ]
    assert check.state is WARN
    assert "`npu-smi` failed" in check.seen


def test_a_chip_without_an_address_fails(tmp_path: Path):
    check = checks_of("a2-no-address", tmp_path)["npu.network"]
    assert check.state is FAIL
    assert "hccn_tool" in check.todo


def test_a_stale_file_warns_and_says_which_is_used(tmp_path: Path):
    check = checks_of("a2-stale-conf", tmp_path)["npu.network"]
    assert check.state is WARN
    assert "/etc/hccn.conf says" in check.seen


def test_a_port_that_is_down_warns_on_a2(tmp_path: Path):
    facts = facts_of("a2-host", tmp_path)
    down = tuple(dataclasses.replace(link, up=False) for link in facts.links)
    found = {c.key: c for c in npu.check_npus(make_host(tmp_path), dataclasses.replace(facts, links=down))}
    assert found["npu.network"].state is WARN
    assert "down" in found["npu.network"].seen


def test_a_missing_hccn_conf_fails_with_the_mount(tmp_path: Path):
    facts = facts_of("a2-host", tmp_path)
    gone = dataclasses.replace(facts, hccn=devices.HccnConf(False, {}))
    found = {c.key: c for c in npu.check_npus(make_host(tmp_path), gone)}
    assert found["npu.hccn-conf"].state is FAIL
    assert "-v /etc/hccn.conf" in found["npu.hccn-conf"].todo
    broken = npu.check_hccn_conf(devices.HccnConf(True, {}, ("line 3: address_0 is 'x', not an IP address",)))
    assert broken.state is FAIL
    assert "line 3" in broken.seen


def test_unlike_tls_switches_fail_and_unread_ones_warn(tmp_path: Path):
    facts = facts_of("a2-host", tmp_path)

    def judge(switches: list[bool | None]) -> Check:
        tls = tuple(dataclasses.replace(facts.tls[i], on=on, detail="no tool") for i, on in enumerate(switches))
        found = {c.key: c for c in npu.check_npus(make_host(tmp_path), dataclasses.replace(facts, tls=tls))}
        return found["npu.tls-switch"]

    assert judge([False, False]).state is OK
    assert judge([True, False]).state is FAIL
    assert "NPU 0" in judge([True, False]).seen
    assert judge([False, None]).state is WARN


def test_two_devices_with_one_physical_id_fail(tmp_path: Path):
    facts = facts_of("a2-host", tmp_path)
    assert facts.inventory is not None
    twins = tuple(device.replace(physical_id=3) for device in facts.inventory.devices[:2])
    doubled = dataclasses.replace(facts, inventory=dataclasses.replace(facts.inventory, devices=twins))
    found = {c.key: c for c in npu.check_npus(make_host(tmp_path), doubled)}
    assert found["npu.ids"].state is FAIL


def test_a_container_with_other_cards_shows_both_ids(tmp_path: Path):
    check = checks_of("a2-container", tmp_path)["npu.ids"]
    assert check.state is OK
    facts = facts_of("a2-container", tmp_path)
    assert facts.inventory is not None
    for device in facts.inventory.visible:
        assert f"{device.logical_id} is {device.physical_id}" in check.seen
    assert any(device.logical_id != device.physical_id for device in facts.inventory.visible)


def test_devices_that_are_all_hidden_fail(tmp_path: Path):
    facts = facts_of("a2-host", tmp_path)
    assert facts.inventory is not None
    hidden = tuple(device.replace(logical_id=None) for device in facts.inventory.devices)
    found = npu.check_npus(
        make_host(tmp_path), dataclasses.replace(facts, inventory=dataclasses.replace(facts.inventory, devices=hidden))
    )
    assert found[0].state is FAIL
    assert "ASCEND_RT_VISIBLE_DEVICES" in found[0].todo


@pytest.mark.parametrize("recording", ["a2-driver-down", "a2-used-elsewhere", "unknown-mapping"])
def test_a_host_whose_tools_fail_fails_with_their_words(recording: str, tmp_path: Path):
    facts = npu.read_npus(make_host(tmp_path), replay(recording, tmp_path))
    checks = npu.check_npus(make_host(tmp_path, num_npus=8), facts)
    assert any(check.state is FAIL and "npu-smi" in check.seen for check in checks), checks


def test_the_memory_beside_the_kv_cache_is_summed_for_both_roles(tmp_path: Path):
    check = checks_of("a2-host", tmp_path)["npu.memory"]
    assert check.state is OK
    for role in PDRole:
        config = PDConfig(role=role, engine_id="x", epoch="", runtime_dir="")
        assert f"{reserved_device_bytes(config) >> 20} MiB on {role.value}" in check.seen


@pytest.mark.parametrize(
    ("environ", "state", "word"),
    [
        ({}, OK, "no HCCL_*"),
        ({"HCCL_RDMA_TC": "132"}, OK, "HCCL_RDMA_TC=132"),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "auto"}, FAIL, "HCCL_NPU_SOCKET_PORT_RANGE"),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "60000-60050"}, OK, "60000-60050"),
        ({"HCCL_INTRA_ROCE_ENABLE": "yes"}, FAIL, "0 or 1"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,1"}, FAIL, "twice"),
        ({"ASCEND_GLOBAL_LOG_LEVEL": "0"}, WARN, "slow"),
    ],
)
def test_variables_that_cann_reads(tmp_path: Path, environ, state, word):
    check = npu.check_environment(make_host(tmp_path, num_npus=1, environ=environ))
    assert check.state is state
    assert word in f"{check.seen} {check.todo}"


def test_variables_do_not_matter_without_npus(tmp_path: Path):
    host = make_host(tmp_path, environ={"HCCL_NPU_SOCKET_PORT_RANGE": "auto"})
    assert npu.check_environment(host).state is NA
