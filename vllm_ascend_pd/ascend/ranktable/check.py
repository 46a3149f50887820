# SPDX-License-Identifier: Apache-2.0
"""Pure: what is wrong with a table that could be read: duplicates, versions, addresses, super nodes.

`check_text` is everything that can be said without the host; `check_host` compares with what discovery found there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import Final

from vllm_ascend_pd.ascend.ranktable.model import (
    VERSIONS,
    Problem,
    RankTable,
    TableDevice,
    TableGroup,
    TableServer,
)
from vllm_ascend_pd.ascend.ranktable.read import Scan, scan_table

Row = tuple[TableGroup, TableServer, TableDevice]

_MAX_NUMBER: Final = 1 << 32
_DIE_LIMIT: Final = 16  # devices of the largest A2 or A3 server


def check_text(text: str) -> Scan:
    """Read a file and check the table in it; problems in the order of lines."""
    scan = scan_table(text)
    if scan.table is not None:
        scan.problems += check_table(scan.table)
        scan.problems.sort(key=lambda problem: problem.line)
    return scan


def check_table(table: RankTable) -> list[Problem]:
    """All that is wrong with the values."""
    rows = list(table.rows())
    return [
        *_check_header(table),
        *_check_numbers(rows),
        *_check_addresses(table, rows),
        *_check_duplicates(table, rows),
        *_check_ranks(table),
        *_check_super_nodes(table, rows),
    ]


def _problem(device: TableDevice, name: str, message: str, action: str) -> Problem:
    return Problem("fail", device.line_of(name), f"{device.place}{name}", message, action)


def _check_header(table: RankTable) -> Iterable[Problem]:
    if table.version and table.version not in VERSIONS:
        action = "write 1.0 for A2, 1.2 for A3 (2.0 and 1.3 are other files)"
        yield Problem(
            "fail", table.line_of("version"), "version", f"is {table.version!r}, known are 1.0 and 1.2", action
        )
    if table.status != "completed":
        seen = f"is {table.status!r}: whoever writes this file has not finished"
        yield Problem("fail", table.line_of("status"), "status", seen, "wait for it, or generate the table again")
    if table.format == "roles" and table.version == "1.0":
        yield Problem(
            "warn",
            table.line_of("version"),
            "version",
            "is 1.0; readers of this format were only given 1.2",
            "write 1.2",
        )
    for group in table.groups:
        if table.format == "groups" and group.group_id in {
            other.group_id for other in table.groups if other is not group
        }:
            yield Problem(
                "fail",
                group.line_of("group_id"),
                f"{group.place}group_id",
                f"group {group.group_id!r} is there twice",
                "merge them",
            )


def _check_numbers(rows: Iterable[Row]) -> Iterable[Problem]:
    names = ("device_id", "rank_id", "cluster_id", "super_device_id", "device_logical_id")
    ports = ("device_port", "host_port", "backup_device_port")
    for _, _, device in rows:
        for name in names:
            value = getattr(device, name)
            if value and not _is_number(value, _MAX_NUMBER):
                yield _problem(device, name, f"is {value[:40]!r}", "write a number, without sign or blanks")
        for name in ports:
            value = getattr(device, name)
            if value and (not _is_number(value, 1 << 16) or int(value) == 0):
                yield _problem(device, name, f"is {value[:40]!r}", "write a port, 1 to 65535")
        if _is_number(device.device_id, _MAX_NUMBER) and int(device.device_id) >= _DIE_LIMIT:
            action = "is this a super device id? write the physical id (/dev/davinci<N> on the host)"
            seen = f"is {device.device_id}; no A2 or A3 server has more than {_DIE_LIMIT} devices"
            yield Problem("warn", device.line_of("device_id"), f"{device.place}device_id", seen, action)


def _is_number(value: str, limit: int) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 10 and int(value) < limit


def _check_addresses(table: RankTable, rows: list[Row]) -> Iterable[Problem]:
    single = len(table.server_ids) == 1
    for _, _, device in rows:
        for name in ("device_ip", "backup_device_ip"):
            value = getattr(device, name)
            if value and not _is_address(value):
                yield _problem(device, name, f"is {value[:60]!r}", "write the NPU's IP address (hccn_tool -i N -ip -g)")
        if not device.device_ip and not single:
            action = "add the NPU's IP address (A2: hccn_tool -i N -ip -g; A3: -vnic -g)"
            yield _problem(device, "device_ip", "is missing: links between servers need it", action)
    for group in table.groups:
        for server in group.servers:
            if server.host_ip and not _is_address(server.host_ip):
                seen = f"is {server.host_ip[:60]!r}"
                yield Problem(
                    "fail", server.line_of("host_ip"), f"{server.place}host_ip", seen, "write the host's IP address"
                )


def _is_address(value: str) -> bool:
    try:
        return not ipaddress.ip_address(value).is_unspecified
    except ValueError:
        return False


def _check_duplicates(table: RankTable, rows: list[Row]) -> Iterable[Problem]:
    one_per_device = "each device belongs to one instance: remove one of the two"
    yield from _twice(rows, "device_id", lambda row: (row[1].server_id, row[2].device_id), one_per_device)
    action = "each NPU has its own address: ask hccn_tool on both hosts"
    yield from _twice(rows, "device_ip", lambda row: (_scope(row), row[2].device_ip), action)
    action = "an SDID is unique in its super pod: ask npu-smi info -t spod-info on both hosts"
    yield from _twice(rows, "super_device_id", lambda row: (row[2].super_pod_id, row[2].super_device_id), action)
    yield from _twice(rows, "rank_id", lambda row: (row[0].group_id, row[2].rank_id), "count from 0 without gaps")
    yield from _twice(rows, "cluster_id", lambda row: ("", row[2].cluster_id), "cluster ids are unique in the file")
    if table.format == "pair":
        seen: dict[str, int] = {}
        for server in (server for group in table.groups for server in group.servers):
            if server.server_id in seen:
                message = f"server {server.server_id!r} is there twice (also on line {seen[server.server_id]})"
                yield Problem(
                    "fail",
                    server.line_of("server_id"),
                    f"{server.place}server_id",
                    message,
                    "put its devices into one entry",
                )
            seen.setdefault(server.server_id, server.line_of("server_id"))


def _scope(row: Row) -> str:
    """Addresses within a super node may repeat in another super pod; all others may not."""
    return row[2].super_pod_id


def _twice(rows: list[Row], name: str, key: Callable[[Row], tuple[str, str]], action: str) -> Iterable[Problem]:
    first: dict[tuple[str, str], TableDevice] = {}
    for row in rows:
        found = key(row)
        device = row[2]
        if not found[1]:
            continue
        if found in first:
            seen = f"{found[1]!r} is there twice (also on line {first[found].line_of(name)})"
            yield _problem(device, name, seen, action)
        else:
            first[found] = device


def _check_ranks(table: RankTable) -> Iterable[Problem]:
    """Pair tables need rank ids 0 … n-1; elsewhere they are optional, but all or none of a group have them."""
    for group in table.groups:
        devices = [device for server in group.servers for device in server.devices]
        without = [device for device in devices if not device.rank_id]
        if without and (table.format == "pair" or len(without) < len(devices)):
            yield _problem(without[0], "rank_id", f"is missing on {len(without)} devices", "count from 0 without gaps")
        numbers = {int(device.rank_id) for device in devices if _is_number(device.rank_id, _MAX_NUMBER)}
        if numbers and not without and len(numbers) == len(devices) and max(numbers) != len(devices) - 1:
            missing = min(set(range(len(devices))) - numbers)
            place = max(devices, key=lambda device: int(device.rank_id))
            seen = f"is {place.rank_id} in a group of {len(devices)}; rank {missing} is missing"
            yield _problem(place, "rank_id", seen, "count from 0 without gaps")


def _check_super_nodes(table: RankTable, rows: list[Row]) -> Iterable[Problem]:
    pods = "run `npu-smi info -t spod-info -i CARD -c CHIP` there and add SDID and Super Pod ID"
    inside = [row for row in rows if row[2].super_device_id or row[2].super_pod_id]
    if not inside:
        if table.format == "pair" and table.version == "1.2":
            seen = "is 1.2, but no device has a super_device_id: links go over RoCE, on A3 they time out without it"
            yield Problem("warn", table.line_of("version"), "version", seen, "on A2 write 1.0; on A3 add SDIDs")
        return
    if table.version == "1.0":
        first = inside[0][2]
        yield _problem(first, "super_device_id", "is of an A3, but the version is 1.0", "write version 1.2")
    for _, server, device in rows:
        if not device.super_device_id:
            seen = f"is missing on NPU {device.device_id} of {server.server_id!r}; other devices of the table have it"
            yield _problem(device, "super_device_id", seen, pods)
        if not device.super_pod_id:
            name = "super_pod_id" if table.format == "roles" else "super_pod_list"
            seen = f"no super pod for NPU {device.device_id} of {server.server_id!r}"
            yield _problem(device, name, seen, pods)
