# SPDX-License-Identifier: Apache-2.0
"""`inventory`: every NPU that this process can see, with all that a rank table needs, and what is wrong with it.

`discover` is the same for those who need an answer or an error: the addresses that go into the handshake. Both ask
the driver's tools each time, in the calling thread; one device takes some tenths of a second.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, Literal

from vllm_ascend_pd.ascend.devices.addresses import AddressReader
from vllm_ascend_pd.ascend.devices.errors import (
    CommandError,
    DeviceError,
    NoDevicesError,
    ToolMissingError,
    UnknownOutputError,
)
from vllm_ascend_pd.ascend.devices.facts import DeviceFacts, Finding, Generation, Inventory
from vllm_ascend_pd.ascend.devices.hccn import hccn_conf
from vllm_ascend_pd.ascend.devices.numbering import VISIBLE_VARIABLE, davinci_ids, physical_ids, read_visible
from vllm_ascend_pd.ascend.devices.outputs import ChipRow, SuperPodPlace, parse_count, parse_mapping, parse_super_pod
from vllm_ascend_pd.ascend.devices.system import System
from vllm_ascend_pd.config import primary_host
from vllm_ascend_pd.wire import DeviceAddress

Network = Literal["auto", "hccs", "roce"]

_A2_NAME: Final = re.compile(r"(?:ascend\s*)?910B\d?(?:-\d)?", re.IGNORECASE)
_A3_NAME: Final = re.compile(r"(?:ascend\s*)?(?:910|910C|910_93\d\d)", re.IGNORECASE)
_MAPPING: Final = "npu-smi info -m"


def discover(
    system: System | None = None,
    *,
    only: Collection[int] | None = None,
    server_id: str = "",
    network: Network = "auto",
    require_ip: bool = True,
) -> list[DeviceAddress]:
    """The devices that this process can use, in logical order; of `only` these logical ids.

    Args:
        system: another machine than this one (tests).
        only: logical ids to look at; the tools are asked about these alone.
        server_id: what names this host in rank tables; default: its address, which pods
            without host networking do not share.
        network: which address: of the super node's network (A3) or of the chip's own port; auto: HCCS where there is
            one.
        require_ip: False where all links stay within one server.

    Raises:
        DeviceError: no devices, or one of them lacks what a rank table needs; says what to do.
    """
    system = system or System()
    found = inventory(system, only=only, network=network)
    return to_addresses(found, system, only=only, server_id=server_id, require_ip=require_ip)


def to_addresses(
    found: Inventory,
    system: System,
    *,
    only: Collection[int] | None = None,
    server_id: str = "",
    require_ip: bool = True,
) -> list[DeviceAddress]:
    """`discover` from an inventory that has been made with the same `only`.

    Raises:
        DeviceError: as `discover`.
    """
    wanted = list(found.visible)
    if only is not None:
        wanted = [device for device in wanted if device.logical_id in only]
        missing = sorted(set(only) - {device.logical_id for device in wanted if device.logical_id is not None})
        if missing:
            there = ", ".join(str(device.logical_id) for device in found.visible)
            raise DeviceError(
                f"there is no NPU with logical id {missing[0]}: this process sees {there or 'none'} "
                f"({VISIBLE_VARIABLE}={system.environ.get(VISIBLE_VARIABLE, '')!r}); lower the parallel size or give "
                "it more devices"
            )
    problems = [
        str(finding)
        for finding in found.findings
        if finding.level == "fail" and (require_ip or finding.code != "no_ip")
    ]
    if problems:
        raise DeviceError("; ".join(problems))
    name = server_id or system.environ.get("VLLM_HOST_IP") or primary_host()
    return [device.address(name) for device in wanted]


def inventory(
    system: System | None = None, *, only: Collection[int] | None = None, network: Network = "auto"
) -> Inventory:
    """All devices, also those that are hidden from this process (`logical_id` None, their addresses not asked for).

    Raises:
        DeviceError: not even the list of devices can be had.
    """
    system = system or System()
    rows, findings = _list_chips(system)
    conf = hccn_conf(system)
    findings += [
        Finding("warn", conf.path, problem, "correct the line, or configure the address with hccn_tool")
        for problem in conf.problems
    ]
    container = [row.logic for row in rows if row.logic is not None]
    physical, source = physical_ids(system, rows)
    visible = read_visible(system.environ.get(VISIBLE_VARIABLE), container, physical)
    if only is None:
        findings += _check_count(system, rows)
    generation = _find_generation(system, rows, findings)
    reader = AddressReader(system, conf, generation, network, dict(zip(container, physical, strict=True)))
    devices: list[DeviceFacts] = []
    for row, container_id, physical_id in zip(rows, container, physical, strict=True):
        logical = visible.index(container_id) if container_id in visible else None
        facts = DeviceFacts(
            logical_id=logical,
            container_id=container_id,
            physical_id=physical_id,
            card=row.card,
            chip=row.chip,
            chip_name=row.name,
            generation=generation,
            physical_source=source,
        )
        if logical is not None and (only is None or logical in only):
            facts = reader.add_addresses(_add_super_pod(system, facts, findings))
        devices.append(facts)
    findings += [*reader.findings, *_find_twins(devices)]
    devices.sort(key=lambda facts: (facts.logical_id is None, facts.logical_id or 0, facts.physical_id))
    return Inventory(generation, tuple(devices), tuple(findings))


def _find_twins(devices: list[DeviceFacts]) -> list[Finding]:
    """Two devices with one address: hccn_tool was asked by numbers that mean something else to it."""
    findings: list[Finding] = []
    first: dict[tuple[str, str], DeviceFacts] = {}
    for device in devices:
        for name, value in (("IP address", device.device_ip), ("SDID", device.super_device_id)):
            twin = first.setdefault((name, value), device) if value else device
            if twin is not device:
                seen = f"has the {name} {value} of NPU {twin.physical_id}"
                action = "compare with `hccn_tool` and `npu-smi info -t spod-info` on the host, and report it"
                findings.append(Finding("fail", f"NPU {device.physical_id}", seen, action, "twins"))
    return findings


def _list_chips(system: System) -> tuple[list[ChipRow], list[Finding]]:
    files = davinci_ids(system)
    try:
        result = system.call("npu-smi", "info", "-m")
    except ToolMissingError as error:
        if not files:
            raise NoDevicesError(
                "there is no NPU here: neither npu-smi nor /dev/davinci* is there; on a host install the driver, in a "
                "container give it the devices (--device /dev/davinci0 …, or the Ascend container runtime)"
            ) from None
        raise ToolMissingError(f"{error} (/dev has {len(files)} davinci devices)") from None
    if "because the device is used" in result.text:
        raise CommandError(
            f"`{_MAPPING}` says {result.text.strip().splitlines()[0]!r}: another container without privileges has the "
            "same card; give each its own cards, or stop the other"
        )
    if result.code != 0:
        shown = result.text.strip().splitlines()
        raise CommandError(
            f"`{_MAPPING}` failed (exit {result.code}): {shown[0] if shown else 'it printed nothing'}; check that the "
            "driver is loaded (`lsmod | grep drv_`), and in a container that /dev/davinci_manager, /dev/devmm_svm and "
            "/dev/hisi_hdc are there"
        )
    listed = parse_mapping(result.text, _MAPPING)
    rows = [row for row in listed if row.logic is not None]
    findings = [
        Finding(
            "warn",
            f"card {row.card} chip {row.chip}",
            "has no logic id: the driver does not offer it",
            "look at `npu-smi info` and `dmesg`; reset the card or leave it out",
        )
        for row in listed
        if row.logic is None
    ]
    if not rows:
        raise NoDevicesError(f"`{_MAPPING}` shows no NPU; on a host check the driver, in a container give it devices")
    if len({row.logic for row in rows}) != len(rows):
        raise UnknownOutputError(_MAPPING, f"logic ids {[row.logic for row in rows]}", "each logic id once")
    return rows, findings


def _check_count(system: System, rows: list[ChipRow]) -> list[Finding]:
    """Cards that the driver lists and that have no usable chip."""
    command = "npu-smi info -l"
    try:
        result = system.call("npu-smi", "info", "-l")
        count = parse_count(result.text, command)
    except DeviceError as error:
        return [Finding("warn", command, str(error), "run it by hand")]
    usable = len({row.card for row in rows})
    if count == usable:
        return []
    seen = f"lists {count} cards, `{_MAPPING}` has usable chips on {usable}"
    return [Finding("warn", command, seen, "look at `npu-smi info` for the card that is missing")]


def _find_generation(system: System, rows: list[ChipRow], findings: list[Finding]) -> Generation:
    """A2 by its chip name; A3 by its answer about super pods, as its chips are called just Ascend910."""
    name = rows[0].name
    if _A2_NAME.fullmatch(name):
        return "a2"
    if _A3_NAME.fullmatch(name) and _ask_super_pod(system, rows[0].card, rows[0].chip) is not None:
        return "a3"
    findings.append(
        Finding(
            "warn",
            f"chip {name!r}",
            "is neither an A2 (910B…) nor an A3 that answers about its super pod",
            "only Atlas A2 and A3 are known here; links are described as on A2",
        )
    )
    return "other"


def _add_super_pod(system: System, facts: DeviceFacts, findings: list[Finding]) -> DeviceFacts:
    if facts.generation != "a3":
        return facts
    action = "run it by hand; without SDID two A3 servers cannot be linked over HCCS"
    subject = f"NPU {facts.physical_id} super pod"
    try:
        place = _ask_super_pod(system, facts.card, facts.chip)
    except DeviceError as error:
        findings.append(Finding("fail", subject, str(error), action, "no_super_id"))
        return facts
    if place is None or not place.super_device_id:
        seen = "is in no super pod"
        findings.append(Finding("warn", subject, seen, "links to other servers need RoCE then", "no_super_id"))
        return facts
    return facts.replace(
        super_device_id=place.super_device_id, super_pod_id=place.super_pod_id, server_index=place.server_index
    )


def _ask_super_pod(system: System, card: int, chip: int) -> SuperPodPlace | None:
    arguments = ("info", "-t", "spod-info", "-i", str(card), "-c", str(chip))
    return parse_super_pod(system.call("npu-smi", *arguments), " ".join(("npu-smi", *arguments)))
