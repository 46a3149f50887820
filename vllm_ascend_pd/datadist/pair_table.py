# SPDX-License-Identifier: Apache-2.0
"""The rank table of one two-sided link, and the device that this rank says it is in one.

Rank 0 is the prefill side, rank 1 the decode side. Both sides build the same text from the same two records and
compare its digest before they link: nobody writes this table, and nobody is handed one. Where the records come from
is `own_device`: the system, or with `--pd-rank-table` a file. Runs in workers; not run on an NPU.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_ascend_pd.ascend.devices import discover, local_addresses
from vllm_ascend_pd.ascend.ranktable import RankTable, from_devices, read_table, write_table
from vllm_ascend_pd.datadist.api import DataDistModule, Way
from vllm_ascend_pd.errors import PDConfigError, PDError
from vllm_ascend_pd.wire import DeviceAddress

logger = logging.getLogger(__name__)

Discover = Callable[..., list[DeviceAddress]]


class PairTableError(PDError):
    """These two devices cannot be in one table; says why."""


def build_pair_table(prefill: DeviceAddress, decode: DeviceAddress) -> str:
    """JSON for `LLMDataDist.link`: version 1.0 for A2, 1.2 with one or two super pods for A3.

    Raises:
        PairTableError: a super node's device with one that is in none, one device twice, or an address missing.
    """
    for side, device in (("prefill", prefill), ("decode", decode)):
        name = f"rank table: the {side} side's NPU {device.physical_id} of server {device.server_id!r}"
        if not device.server_id or not device.device_ip:
            missing = "device_ip" if device.server_id else "server_id"
            raise PairTableError(f"{name} has no {missing}; run `vllm pd doctor` there")
        if bool(device.super_device_id) != bool(device.super_pod_id):
            raise PairTableError(
                f"{name} has super_device_id {device.super_device_id!r} and super_pod_id {device.super_pod_id!r}; "
                "give both or neither"
            )
    try:
        return write_table(from_devices([prefill, decode]), indent=None)
    except PDError as error:
        raise PairTableError(f"rank table: {error}") from error


def digest(table: str) -> str:
    """What both sides compare."""
    return hashlib.sha256(table.encode()).hexdigest()[:32]


def own_device(
    module: DataDistModule,
    way: Way,
    device_index: int,
    rank_table: str = "",
    role: str = "",
    find: Discover = discover,
) -> DeviceAddress | None:
    """The device of this rank; None on CPU, and where it is not needed and cannot be read.

    Raises:
        PDConfigError: a rank table is needed and the device is not known, or not in the given file.
    """
    if module.name == "host":
        return None
    needs_ip = way is Way.TWO_SIDED and not rank_table
    try:
        (found,) = find(only=[device_index], require_ip=needs_ip)
    except PDError as error:
        if way is Way.TWO_SIDED:
            raise PDConfigError(f"data plane: the address of NPU {device_index} is needed: {error}") from error
        logger.warning("data plane: the address of NPU %d could not be read: %s", device_index, error)
        return None
    if not rank_table:
        return found
    try:
        table = read_table(Path(rank_table).read_text())
    except (OSError, ValueError, PDError) as error:
        raise PDConfigError(f"--pd-rank-table: {rank_table}: {error}") from error
    return find_in_table(table, found, {found.server_id, *map(str, local_addresses())}, rank_table, role)


def find_in_table(
    table: RankTable, found: DeviceAddress, own_names: Iterable[str], path: str, role: str = ""
) -> DeviceAddress:
    """The entry of the device `found` (by its physical id) on the host of these names. Pure.

    Raises:
        PDConfigError: it is not there, or there for the other role only.
    """
    names = set(own_names)
    entries = [
        (group, server, device)
        for group, server, device in table.rows()
        if server.server_id in names and device.device_id == str(found.physical_id)
    ]
    if not entries:
        raise PDConfigError(
            f"--pd-rank-table: {path} does not name NPU {found.physical_id} on a server with one of this host's names "
            f"({', '.join(sorted(names))}); run `vllm pd ranktable check` and correct server_id or device_id"
        )
    fitting = [entry for entry in entries if not role or entry[0].title in (role, "")]
    if not fitting:
        raise PDConfigError(
            f"--pd-rank-table: {path} has NPU {found.physical_id} under {entries[0][0].title}, but this instance is "
            f"{role}; correct the table, or give this instance other devices (ASCEND_RT_VISIBLE_DEVICES)"
        )
    _, server, device = fitting[0]
    return DeviceAddress(
        server_id=server.server_id,
        logical_id=found.logical_id,
        physical_id=found.physical_id,
        device_ip=device.device_ip or found.device_ip,
        super_device_id=device.super_device_id,
        super_pod_id=device.super_pod_id,
    )
