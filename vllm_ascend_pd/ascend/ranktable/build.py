# SPDX-License-Identifier: Apache-2.0
"""Pure: devices to tables. `from_devices` is what the data plane gives to `link`: nobody writes that table by hand."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ascend_pd.ascend.ranktable.model import (
    DECODE,
    GROUP_IDS,
    PREFILL,
    RankTable,
    RankTableError,
    TableDevice,
    TableGroup,
    TableServer,
)
from vllm_ascend_pd.wire import DeviceAddress


def from_devices(
    ranks: Sequence[DeviceAddress], *, host_ips: Sequence[str] = (), device_ports: Sequence[int] = ()
) -> RankTable:
    """A pair table: version 1.0 for A2, 1.2 with super pods for A3. Rank ids are positions in `ranks`.

    Args:
        ranks: the devices of the communicator, two for a link.
        host_ips: per rank, the address of its host; "" leaves it out.
        device_ports: per rank, where it listens; 0 leaves it out (the default port then).

    Raises:
        RankTableError: no devices, one of them twice, or some with and some without a place in a super node.
    """
    version = _common_version(ranks)
    devices: dict[str, list[TableDevice]] = {}
    hosts: dict[str, str] = {}
    for rank, address in enumerate(ranks):
        port = device_ports[rank] if device_ports else 0
        device = _device(address, rank_id=str(rank), port=str(port) if port else "")
        devices.setdefault(address.server_id, []).append(device)
        if host_ips and host_ips[rank]:
            hosts.setdefault(address.server_id, host_ips[rank])
    servers = tuple(TableServer(name, tuple(found), host_ip=hosts.get(name, "")) for name, found in devices.items())
    return RankTable("pair", version, (TableGroup("", servers),))


def roles_table(prefill: Sequence[DeviceAddress], decode: Sequence[DeviceAddress]) -> RankTable:
    """The format with `prefill_device_list` and `decode_device_list`; cluster ids count from 1 over both.

    Raises:
        RankTableError: as `from_devices`.
    """
    _common_version([*prefill, *decode])
    groups = []
    cluster = 0
    for role, addresses in ((PREFILL, prefill), (DECODE, decode)):
        servers: list[TableServer] = []
        for address in addresses:
            cluster += 1
            device = _device(address, cluster_id=str(cluster))
            if servers and servers[-1].server_id == address.server_id:
                servers[-1] = TableServer(address.server_id, (*servers[-1].devices, device))
            else:
                servers.append(TableServer(address.server_id, (device,)))
        groups.append(TableGroup(role, tuple(servers)))
    return RankTable("roles", "1.2", tuple(groups))  # readers of this format know no other version


def groups_table(router: str, prefill: Sequence[DeviceAddress], decode: Sequence[DeviceAddress]) -> RankTable:
    """The format with `server_group_list`: 0 the router's host, 1 prefill, 2 decode; rank ids count within a group.

    Raises:
        RankTableError: as `from_devices`.
    """
    version = _common_version([*prefill, *decode])
    groups = [TableGroup(GROUP_IDS["router"], (TableServer(router, server_ip=router),))]
    for role, addresses in ((PREFILL, prefill), (DECODE, decode)):
        devices: dict[str, list[TableDevice]] = {}
        for rank, address in enumerate(addresses):
            device = _device(address, rank_id=str(rank), logical_id=str(address.logical_id))
            devices.setdefault(address.server_id, []).append(device)
        servers = tuple(TableServer(name, tuple(found), server_ip=name) for name, found in devices.items())
        groups.append(TableGroup(GROUP_IDS[role], servers))
    return RankTable("groups", version, tuple(groups))


def _device(
    address: DeviceAddress, *, rank_id: str = "", cluster_id: str = "", port: str = "", logical_id: str = ""
) -> TableDevice:
    return TableDevice(
        device_id=str(address.physical_id),
        device_ip=address.device_ip,
        super_device_id=address.super_device_id,
        super_pod_id=address.super_pod_id,
        rank_id=rank_id,
        cluster_id=cluster_id,
        device_port=port,
        device_logical_id=logical_id,
    )


def _common_version(ranks: Sequence[DeviceAddress]) -> str:
    if not ranks:
        raise RankTableError("a rank table needs at least one device")
    seen: set[tuple[str, int]] = set()
    for address in ranks:
        key = (address.server_id, address.physical_id)
        if key in seen:
            raise RankTableError(
                f"NPU {address.physical_id} of server {address.server_id} is there twice; one device is one rank: give "
                "each instance its own devices (ASCEND_RT_VISIBLE_DEVICES)"
            )
        seen.add(key)
    inside = [address for address in ranks if address.super_device_id and address.super_pod_id]
    if not inside:
        return "1.0"
    outside = [address for address in ranks if not (address.super_device_id and address.super_pod_id)]
    if outside:
        raise RankTableError(
            f"NPU {inside[0].physical_id} of server {inside[0].server_id} is in super pod "
            f"{inside[0].super_pod_id}, NPU {outside[0].physical_id} of server {outside[0].server_id} in none; A2 and "
            "A3 are not linked with each other: check `npu-smi info -t spod-info` on both"
        )
    return "1.2"
