# SPDX-License-Identifier: Apache-2.0
"""Discovery over all recordings: addresses, findings, and errors that show the line."""

from __future__ import annotations

import pytest

from tests.unit.ascend.replay import RECORDINGS, build, read_recording, replay
from vllm_ascend_pd.ascend.devices import (
    CommandError,
    DeviceError,
    NoDevicesError,
    ToolMissingError,
    UnknownOutputError,
    discover,
    inventory,
    link_state,
    local_addresses,
    npu_health,
    tls_switch,
)


def a2(server, logical, physical, last):
    return (server, logical, physical, f"192.0.2.{last}", "", "")


def a3(server, logical, physical, pod, index, net):
    card, chip = divmod(physical, 2)
    sdid = index * 4194304 + card * 262144 + chip * 65536
    return (server, logical, physical, f"192.168.{net}.{physical}", str(sdid), str(pod))


H1, H2, H3 = "198.51.100.21", "198.51.100.22", "198.51.100.23"
EXPECTED = {
    "a2-host": [a2("198.51.100.11", n, n, 10 + n) for n in range(8)],
    "a2-host-tls": [a2("198.51.100.12", n, n, 20 + n) for n in range(2)],
    "a2-container": [a2("198.51.100.11", 0, 4, 14), a2("198.51.100.11", 1, 7, 17)],
    "a2-container-no-hccn-tool": [a2("198.51.100.11", 0, 4, 14), a2("198.51.100.11", 1, 7, 17)],
    "a2-container-visible": [a2("198.51.100.11", 0, 7, 17)],
    "a2-container-remap": [
        a2("198.51.100.11", 0, 2, 12),
        a2("198.51.100.11", 1, 5, 15),
        a2("198.51.100.11", 2, 6, 16),
    ],
    "a2-container-swapped": [a2("198.51.100.11", 0, 1, 11), a2("198.51.100.11", 1, 0, 10)],
    "a2-no-hccn-tool": [a2("198.51.100.11", 0, 0, 10), a2("198.51.100.11", 1, 1, 11)],
    "a2-alarm": [a2("198.51.100.11", 0, 0, 10), a2("198.51.100.11", 1, 1, 11)],
    "a2-card-lost": [a2("198.51.100.11", 0, 0, 10), a2("198.51.100.11", 1, 2, 12)],
    "a2-stale-conf": [a2("198.51.100.11", 0, 0, 10)],
    "a5": [a2("198.51.100.11", 0, 0, 10), a2("198.51.100.11", 1, 1, 11)],
    "a3-host": [a3(H1, n, n, 0, 4, 44) for n in range(16)],
    "a3-host-second": [a3(H2, n, n, 0, 5, 45) for n in range(16)],
    "a3-host-other-pod": [a3(H3, n, n, 1, 4, 44) for n in range(16)],
    "a3-container": [a3(H1, n, n + 4, 0, 4, 44) for n in range(4)],
    "a3-no-super-pod": [(H1, n, n, f"192.168.44.{n}", "", "") for n in range(2)],
    "a3-no-hccn-tool": [(H1, n, n, f"203.0.113.{n + 1}", str(16777216 + n * 65536), "0") for n in range(2)],
}
REFUSED = {
    "a2-container-host-numbers": (DeviceError, r"names device 4.*numbered 0\.\.1.*host's numbers.*write 0,1\)"),
    "a2-container-extra-files": (DeviceError, r"shows 2 chips, /dev has 8 davinci devices \(0\.\.7\).*give the cont"),
    "a2-no-hccn-at-all": (DeviceError, r"NPU 0 address: hccn_tool is not here and /etc/hccn.conf is not there; mount"),
    "a2-no-address": (DeviceError, r"NPU 0 address: no IP address is configured; .* -i 0 -ip -s address"),
    "a2-busy": (DeviceError, r"`hccn_tool -i 0 -ip -g` has been busy for 30 s; another program"),
    "a2-used-elsewhere": (CommandError, r"because the device is used.*another container without privileges"),
    "a2-driver-down": (CommandError, r"failed \(exit 1\): dcmi module initialize failed.*lsmod"),
    "a2-no-permission": (DeviceError, r"`hccn_tool -i 0 -ip -g` says 'permission denied.*HwHiAiUser"),
    "a2-hangs": (DeviceError, r"NPU 1 address: `hccn_tool -i 1 -ip -g` did not end within 10 s.*dmesg"),
    "a2-unknown-address": (DeviceError, r"found 'addresses of port 0: 192.0.2.10/24'.*report"),
    "unknown-mapping": (UnknownOutputError, r"expected a header.*found '\+-----\+------\+'"),
    "unknown-row": (UnknownOutputError, r"line 4: expected a number.*`chip logic id`, found '1 .*first.*910B3'"),
    "no-npu": (NoDevicesError, r"no NPU here: neither npu-smi nor /dev/davinci\*"),
    "tools-absent": (ToolMissingError, r"npu-smi is not here; mount /usr/local/bin/npu-smi.*2 davinci devices"),
    "a3-super-pod-broken": (DeviceError, r"NPU 1 super pod: .*expected a number for `SDID`, found 'SDID : 0x1010000'"),
}


def as_tuples(devices):
    return [(d.server_id, d.logical_id, d.physical_id, d.device_ip, d.super_device_id, d.super_pod_id) for d in devices]


def test_every_recording_has_its_expectation():
    assert {path.stem for path in RECORDINGS.glob("*.txt")} == set(EXPECTED) | set(REFUSED)


@pytest.mark.parametrize("name", EXPECTED)
def test_devices_of_a_recording_are_found(name, tmp_path):
    assert as_tuples(discover(replay(name, tmp_path))) == EXPECTED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_line_and_what_to_do(name, tmp_path):
    kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        discover(replay(name, tmp_path))
    assert "\n" not in str(caught.value)


def test_one_device_is_asked_about_alone(tmp_path):
    recording = read_recording("a3-host")
    (device,) = discover(build(recording, tmp_path), only=[5])
    assert (device.logical_id, device.physical_id) == (5, 5)
    assert recording.calls == [
        "npu-smi info -m",
        "npu-smi info -t spod-info -i 0 -c 0",
        "npu-smi info -t spod-info -i 2 -c 1",
        "hccn_tool -i 5 -vnic -g",
    ]


def test_a_logical_id_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DeviceError, match=r"no NPU with logical id 1: this process sees 0 \(ASCEND_RT_VISIBLE_DEV"):
        discover(replay("a2-container-visible", tmp_path), only=[1])


@pytest.mark.parametrize(
    ("name", "command", "copied", "seen"),
    [
        ("a2-host", "hccn_tool -i 6 -ip -g", "hccn_tool -i 2 -ip -g", "NPU 6: has the IP address 192.0.2.12 of NPU 2"),
        (
            "a3-host",
            "npu-smi info -t spod-info -i 3 -c 1",
            "npu-smi info -t spod-info -i 3 -c 0",
            "NPU 7: has the SDID 17563648 of NPU 6",
        ),
    ],
)
def test_two_devices_with_one_address_are_refused(name, command, copied, seen, tmp_path):
    recording = read_recording(name)
    recording.answers[command] = recording.answers[copied]
    with pytest.raises(DeviceError, match=seen):
        discover(build(recording, tmp_path))


def test_one_sick_device_does_not_hide_the_others(tmp_path):
    assert as_tuples(discover(replay("a2-hangs", tmp_path), only=[0])) == [a2("198.51.100.11", 0, 0, 10)]


def test_devices_without_an_address_serve_links_within_a_server(tmp_path):
    devices = discover(replay("a2-no-address", tmp_path), require_ip=False)
    assert [device.device_ip for device in devices] == ["", ""]


def test_an_a3_gives_the_address_of_its_own_port_when_asked(tmp_path):
    devices = discover(replay("a3-host", tmp_path), network="roce", server_id="rack-1")
    assert [device.device_ip for device in devices] == [f"203.0.113.{n + 1}" for n in range(16)]
    assert {device.server_id for device in devices} == {"rack-1"}


def test_hidden_devices_are_listed_last_and_without_addresses(tmp_path):
    found = inventory(replay("a2-container-visible", tmp_path))
    assert [(d.logical_id, d.container_id, d.physical_id, d.device_ip) for d in found.devices] == [
        (0, 1, 7, "192.0.2.17"),
        (None, 0, 4, ""),
    ]
    with pytest.raises(ValueError, match="NPU 4 is hidden"):
        found.devices[1].address("x")


@pytest.mark.parametrize(
    ("name", "generation", "codes"),
    [
        ("a2-host", "a2", []),
        ("a2-container", "a2", []),
        ("a3-host", "a3", []),
        ("a5", "other", [""]),
        ("a2-stale-conf", "a2", ["stale_conf"]),
        ("a2-no-hccn-tool", "a2", [""]),
        ("a2-card-lost", "a2", ["", ""]),
        ("a2-container-swapped", "a2", ["ambiguous_ids"]),
        ("a3-no-super-pod", "a3", ["no_super_id", "no_super_id"]),
        ("a3-no-hccn-tool", "a3", ["no_vnic", "no_vnic"]),
        ("a2-no-address", "a2", ["no_ip", "no_ip"]),
    ],
)
def test_findings_of_a_recording(name, generation, codes, tmp_path):
    found = inventory(replay(name, tmp_path))
    assert found.generation == generation
    assert [finding.code for finding in found.findings] == codes
    assert all(finding.seen and finding.action for finding in found.findings)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a2-host", "/dev/davinci*"),
        ("a2-container", "order of /dev/davinci*"),
        ("a2-container-remap", "npu-smi info -t phyid-remap"),
        ("a3-host", "npu-smi info -m"),
    ],
)
def test_where_the_physical_ids_come_from_is_said(name, source, tmp_path):
    assert {d.physical_source for d in inventory(replay(name, tmp_path)).devices} == {source}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0,0", "0 is there twice"),
        ("0,x", "'x' is not a number"),
        ("0,", "'' is not a number"),
        ("2", "names device 2"),
    ],
)
def test_a_wrong_list_of_visible_devices_is_refused(value, message, tmp_path):
    recording = read_recording("a2-container-visible")
    recording.environ["ASCEND_RT_VISIBLE_DEVICES"] = value
    with pytest.raises(DeviceError, match=message):
        discover(build(recording, tmp_path))


def test_logical_order_is_that_of_the_variable(tmp_path):
    recording = read_recording("a2-host")
    recording.environ["ASCEND_RT_VISIBLE_DEVICES"] = "3, 1"
    devices = discover(build(recording, tmp_path))
    assert [(d.logical_id, d.physical_id) for d in devices] == [(0, 3), (1, 1)]


def test_health_names_the_sick_chip(tmp_path):
    system = replay("a2-alarm", tmp_path)
    healthy, sick = npu_health(inventory(system), system)
    assert (healthy.ok, healthy.status, healthy.detail) == (True, "OK", "")
    assert (sick.ok, sick.status, sick.detail) == (False, "Alarm", "error code 80E01801")


def test_tls_is_off_without_a_certificate(tmp_path):
    system = replay("a2-host-tls", tmp_path)
    assert [switch.on for switch in tls_switch(inventory(system), system)] == [False, True]


def test_link_state_is_read(tmp_path):
    system = replay("a2-alarm", tmp_path)
    assert [(link.up, link.network) for link in link_state(inventory(system), system)] == [
        (True, "Success"),
        (False, "Fault"),
    ]


def test_health_that_cannot_be_read_is_reported_per_device(tmp_path):
    system = replay("a2-alarm", tmp_path)
    found = inventory(system)
    (tmp_path / "usr/local/bin/npu-smi").unlink()
    (tmp_path / "usr/local/Ascend/driver/tools/hccn_tool").unlink()
    assert [(h.status, "npu-smi is not here" in h.detail) for h in npu_health(found, system)] == [("", True)] * 2
    assert [(t.on, "hccn_tool is not here" in t.detail) for t in tls_switch(found, system)] == [(None, True)] * 2
    assert [(t.up, "hccn_tool is not here" in t.detail) for t in link_state(found, system)] == [(None, True)] * 2


def test_addresses_of_the_host_come_from_the_kernel(tmp_path):
    assert local_addresses(replay("a2-host", tmp_path)) == {"127.0.0.1", "198.51.100.11", "::1"}
