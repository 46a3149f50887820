# SPDX-License-Identifier: Apache-2.0
"""Pure: `RankTable` to text. All scalars become JSON texts; empty fields are left out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vllm_ascend_pd.ascend.ranktable.model import (
    DECODE,
    PREFILL,
    RankTable,
    RankTableError,
    TableDevice,
    TableGroup,
    TableServer,
)


def write_table(table: RankTable, *, indent: int | None = 2) -> str:
    """The file's content, with a line end when it is indented.

    Raises:
        RankTableError: the table has what its format cannot say.
    """
    head: dict[str, Any] = {
        "version": table.version,
        "server_count": str(len(table.server_ids)),
        "status": table.status,
        **dict(table.extras),
    }
    if table.format == "pair":
        servers = [server for group in table.groups for server in group.servers]
        body = _servers(servers)
    elif table.format == "roles":
        body = {f"{role}_device_list": _role_devices(table, role) for role in (PREFILL, DECODE)}
    else:
        body = {"server_group_list": [_group(group) for group in table.groups]}
    text = json.dumps({**head, **body}, indent=indent, ensure_ascii=False)
    return text + "\n" if indent is not None else text


def _group(group: TableGroup) -> dict[str, Any]:
    return {"group_id": group.group_id, "server_count": str(len(group.servers)), **_servers(group.servers)}


def _servers(servers: Iterable[TableServer]) -> dict[str, Any]:
    """`server_list`, and `super_pod_list` where devices have super pods."""
    listed: list[dict[str, Any]] = []
    pods: dict[str, list[str]] = {}
    for server in servers:
        entry: dict[str, Any] = {"server_id": server.server_id}
        entry |= dict(_optional(server, ("host_ip", "server_ip")))
        entry |= dict(server.extras)
        if server.devices:
            entry["device"] = [_device(device) for device in server.devices]
        listed.append(entry)
        found = {device.super_pod_id for device in server.devices}
        if len(found) > 1:
            raise RankTableError(
                f"server {server.server_id!r} has devices in several super pods or in none ({sorted(found)}): this "
                "format says it per server; write a roles table"
            )
        if (pod := found.pop() if found else "") and server.server_id not in pods.setdefault(pod, []):
            pods[pod].append(server.server_id)
    result: dict[str, Any] = {"server_list": listed}
    if pods:
        result["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": name} for name in names]} for pod, names in pods.items()
        ]
    return result


_PAIR_FIELDS = (
    "device_ip",
    "rank_id",
    "cluster_id",
    "super_device_id",
    "device_port",
    "host_port",
    "backup_device_ip",
    "backup_device_port",
    "device_logical_id",
)


def _device(device: TableDevice) -> dict[str, str]:
    return {"device_id": device.device_id, **dict(_optional(device, _PAIR_FIELDS)), **dict(device.extras)}


def _role_devices(table: RankTable, role: str) -> list[dict[str, str]]:
    fields = ("device_ip", "cluster_id", "super_pod_id", "super_device_id", *_PAIR_FIELDS[4:], "rank_id")
    return [
        {
            "server_id": server.server_id,
            "device_id": device.device_id,
            **dict(_optional(device, fields)),
            **dict(device.extras),
        }
        for group, server, device in table.rows()
        if group.group_id == role
    ]


def _optional(holder: TableDevice | TableServer, names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, value) for name in names if (value := getattr(holder, name))]
