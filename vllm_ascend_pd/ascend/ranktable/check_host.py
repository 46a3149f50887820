# SPDX-License-Identifier: Apache-2.0
"""Pure: a table against the host that it is checked on. Discovery has been done by the caller."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from vllm_ascend_pd.ascend.devices import DeviceFacts, Inventory
from vllm_ascend_pd.ascend.ranktable.model import Problem, RankTable, TableDevice, TableServer

_GENERATE = "generate the table again (vllm pd ranktable generate)"


def check_host(table: RankTable, found: Inventory, own_names: Collection[str]) -> list[Problem]:
    """Compare the entries of this host.

    Args:
        table: as read.
        found: all devices of this host; those that are hidden from this process have no addresses.
        own_names: server ids that mean this host: its addresses, and what the user named.
    """
    here = [(server, device) for _, server, device in table.rows() if server.server_id in own_names]
    if not here:
        names = ", ".join(table.server_ids[:4]) + (", …" if len(table.server_ids) > 4 else "")
        own = ", ".join(sorted(own_names)[:6])
        line = next((server.line_of("server_id") for group in table.groups for server in group.servers), table.line)
        return [
            Problem(
                "fail",
                line,
                "server_id",
                f"no server of the table is this host: the table has {names}; this host has {own}",
                "write the address that instances use (VLLM_HOST_IP where a host has several), name this host with "
                "--server-id, or check with --offline",
            )
        ]
    by_physical = {str(device.physical_id): device for device in found.devices}
    problems: list[Problem] = []
    for server, device in here:
        problems += _compare(server, device, by_physical, found)
    if found.generation == "a3" and not table.has_super_pods:
        first = here[0][1]
        seen = "is missing on all devices, and this host is an A3"
        problems.append(Problem("fail", first.line, f"{first.place}super_device_id", seen, _GENERATE))
    if found.generation == "a3" and table.format == "pair" and table.version == "1.0":
        seen = "is 1.0, and this host is an A3"
        problems.append(
            Problem("fail", table.line_of("version"), "version", seen, "write 1.2, with super ids; or " + _GENERATE)
        )
    return problems


def _compare(
    server: TableServer, device: TableDevice, by_physical: dict[str, DeviceFacts], found: Inventory
) -> Iterable[Problem]:
    actual = by_physical.get(device.device_id)
    if actual is None:
        there = ", ".join(sorted(by_physical, key=int))
        hint = ""
        if device.device_id in {str(facts.container_id) for facts in found.devices}:
            hint = " (this container counts from 0; the table needs the host's numbers)"
        seen = f"server {server.server_id!r} has no NPU {device.device_id}; here are {there}{hint}"
        yield Problem(
            "fail",
            device.line_of("device_id"),
            f"{device.place}device_id",
            seen,
            "write the physical id, or " + _GENERATE,
        )
        return
    if actual.logical_id is None:
        seen = f"NPU {device.device_id} is hidden from this process (ASCEND_RT_VISIBLE_DEVICES): not compared"
        yield Problem(
            "warn", device.line_of("device_id"), f"{device.place}device_id", seen, "check where the variable is not set"
        )
        return
    pairs = (
        ("device_ip", device.device_ip, {actual.device_ip, actual.nic_ip, actual.vnic_ip}),
        ("super_device_id", device.super_device_id, {actual.super_device_id}),
        ("super_pod_id", device.super_pod_id, {actual.super_pod_id}),
    )
    for name, written, possible in pairs:
        possible = possible - {""}
        if written and possible and written not in possible:
            seen = f"is {written}, the driver says {' or '.join(sorted(possible))}: the table is older than the host"
            # On A3 the address of the chip's own port may stand there as well, and has not been asked for.
            unsure = name == "device_ip" and found.generation == "a3" and not actual.nic_ip
            level: Literal["warn", "fail"] = "warn" if unsure else "fail"
            yield Problem(level, device.line_of(name), f"{device.place}{name}", seen, _GENERATE)
