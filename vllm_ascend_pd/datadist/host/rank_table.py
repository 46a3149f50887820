# SPDX-License-Identifier: Apache-2.0
"""Pure: rank tables of `link`, and where each rank can be met (§5).

The host engine has no devices: a rank's meeting place is the first IPv4 address of host_ip, server_id, device_ip,
with device_port, or 16666 + rank. All other fields are checked for their type and not used.
"""

from __future__ import annotations

import ipaddress
import json
from typing import Any, Final

Address = tuple[str, int]

VERSIONS: Final = ("1.0", "1.2")
BASE_PORT: Final = 16666
_MAX_BYTES: Final = 1 << 20
_OPTIONAL_TEXTS: Final = ("device_ip", "super_device_id", "backup_device_ip", "backup_device_port", "host_port")


class BadRankTable(ValueError):
    """Names the field and what it holds."""


def parse_rank_table(text: str) -> dict[int, Address]:
    """Where each rank listens. Raises BadRankTable."""
    if len(text) > _MAX_BYTES:
        raise BadRankTable(f"the table has {len(text)} characters, at most {_MAX_BYTES} are read")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRankTable(f"not JSON: {error}") from None
    if not isinstance(table, dict):
        raise BadRankTable(f"not a JSON object but {type(table).__name__}")
    version = _text(table, "version", "")
    if version not in VERSIONS:
        raise BadRankTable(f"version is {version!r}, known are {VERSIONS}")
    status = table.get("status", "completed")
    if status != "completed":
        raise BadRankTable(f"status is {status!r}, not 'completed'")
    servers = _list(table, "server_list", "")
    count = _text(table, "server_count", "")
    if count != str(len(servers)):
        raise BadRankTable(f"server_count is {count!r}, server_list has {len(servers)} entries")
    ranks: dict[int, Address] = {}
    for number, server in enumerate(servers):
        _add_server(ranks, server, f"server_list[{number}].", version)
    return ranks


def _add_server(ranks: dict[int, Address], server: Any, place: str, version: str) -> None:
    server_id = _text(server, "server_id", place)
    host_ip = _text(server, "host_ip", place, optional=True)
    if host_ip and not _is_ipv4(host_ip):
        raise BadRankTable(f"{place}host_ip is {host_ip!r}, not an IPv4 address")
    for number, device in enumerate(_list(server, "device", place)):
        here = f"{place}device[{number}]."
        _text(device, "device_id", here)
        rank_text = _text(device, "rank_id", here)
        for name in _OPTIONAL_TEXTS:
            _text(device, name, here, optional=name != "device_ip" or version != "1.0")
        if not rank_text.isdecimal():
            raise BadRankTable(f"{here}rank_id is {rank_text!r}, not a number")
        rank = int(rank_text)
        if rank in ranks:
            raise BadRankTable(f"{here}rank_id {rank} occurs twice")
        address = _find_address(host_ip, server_id, device, here), _find_port(device, rank, here)
        if address in ranks.values():
            raise BadRankTable(f"{here}rank {rank} has the address {address[0]}:{address[1]} of another rank")
        ranks[rank] = address


def _find_address(host_ip: str, server_id: str, device: dict[str, Any], place: str) -> str:
    for candidate in (host_ip, server_id, str(device.get("device_ip", ""))):
        if _is_ipv4(candidate):
            return candidate
    raise BadRankTable(f"{place}neither host_ip nor server_id {server_id!r} nor device_ip is an IPv4 address")


def _find_port(device: dict[str, Any], rank: int, place: str) -> int:
    text = _text(device, "device_port", place, optional=True)
    if not text:
        port = BASE_PORT + rank
    elif text.isdecimal() and len(text) <= 5:
        port = int(text)
    else:
        raise BadRankTable(f"{place}device_port is {text!r}, not a port")
    if not 0 < port < 1 << 16:
        raise BadRankTable(f"{place}port {port} is out of range")
    return port


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _text(holder: Any, name: str, place: str, *, optional: bool = False) -> str:
    """A field, all of which are strings."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if value is None and optional:
        return ""
    if not isinstance(value, str) or (not value and not optional):
        raise BadRankTable(f"{place}{name} must be a string, not {value!r}")
    return value


def _list(holder: Any, name: str, place: str) -> list[Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, list) or not value:
        raise BadRankTable(f"{place}{name} must be a list that is not empty")
    return value
