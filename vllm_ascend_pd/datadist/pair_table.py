# SPDX-License-Identifier: Apache-2.0
"""Pure: the rank table of one two-sided link, built from what both sides say of their devices.

Rank 0 is the prefill side, rank 1 the decode side. Both sides build the same text from the same two records and
compare its digest before they link: nobody writes this file, and nobody is handed one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.wire import DeviceAddress

VERSION_A2: Final = "1.0"
VERSION_A3: Final = "1.2"


class PairTableError(PDError):
    """These two devices cannot be in one table; says why."""


def build_pair_table(prefill: DeviceAddress, decode: DeviceAddress) -> str:
    """JSON for `LLMDataDist.link`; every scalar in it is a string, as the format wants.

    Raises:
        PairTableError: a super node's device with one that is in none, one device twice, or an address missing.
    """
    _check(prefill, decode)
    is_super_node = bool(prefill.super_device_id)
    devices = [_describe(rank, device, is_super_node) for rank, device in enumerate((prefill, decode))]
    servers: list[dict[str, object]] = []
    if prefill.server_id == decode.server_id:
        servers = [{"server_id": prefill.server_id, "device": devices}]
    else:
        servers = [
            {"server_id": device.server_id, "device": [text]}
            for device, text in zip((prefill, decode), devices, strict=True)
        ]
    table: dict[str, object] = {
        "version": VERSION_A3 if is_super_node else VERSION_A2,
        "status": "completed",
        "server_count": str(len(servers)),
        "server_list": servers,
    }
    if is_super_node:
        table["super_pod_list"] = _list_pods(prefill, decode)
    return json.dumps(table, sort_keys=True, separators=(",", ":"))


def digest(table: str) -> str:
    """What both sides compare."""
    return hashlib.sha256(table.encode()).hexdigest()[:32]


def _check(prefill: DeviceAddress, decode: DeviceAddress) -> None:
    for side, device in (("prefill", prefill), ("decode", decode)):
        if not device.server_id or not device.device_ip:
            missing = "server_id" if not device.server_id else "device_ip"
            raise PairTableError(
                f"rank table: the {side} side's NPU {device.physical_id} has no {missing}; "
                "run `vllm pd ranktable check` there"
            )
        if bool(device.super_device_id) != bool(device.super_pod_id):
            raise PairTableError(
                f"rank table: the {side} side's NPU {device.physical_id} has super_device_id "
                f"{device.super_device_id!r} and super_pod_id {device.super_pod_id!r}; give both or neither"
            )
    if bool(prefill.super_device_id) != bool(decode.super_device_id):
        raise PairTableError(
            f"rank table: super_device_id: prefill has {prefill.super_device_id!r}, decode {decode.super_device_id!r}; "
            "an A2 and an A3 device cannot be in one table"
        )
    if (prefill.server_id, prefill.physical_id) == (decode.server_id, decode.physical_id):
        raise PairTableError(
            f"rank table: NPU {prefill.physical_id} of server {prefill.server_id} is on both sides; "
            "run prefill and decode on different devices"
        )


def _describe(rank: int, device: DeviceAddress, is_super_node: bool) -> dict[str, str]:
    text = {"device_id": str(device.physical_id), "device_ip": device.device_ip, "rank_id": str(rank)}
    return {**text, "super_device_id": device.super_device_id} if is_super_node else text


def _list_pods(prefill: DeviceAddress, decode: DeviceAddress) -> list[dict[str, object]]:
    """One pod, or two; a server is named once in its pod."""
    pods: dict[str, list[str]] = {}
    for device in (prefill, decode):
        servers = pods.setdefault(device.super_pod_id, [])
        if device.server_id not in servers:
            servers.append(device.server_id)
    return [
        {"super_pod_id": pod, "server_list": [{"server_id": server} for server in servers]}
        for pod, servers in pods.items()
    ]
