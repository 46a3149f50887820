# SPDX-License-Identifier: Apache-2.0
"""One model for the three formats of rank tables. Values only; every scalar is text, as HCCL wants it.

A table has groups of servers with devices. A *pair* table has one group without a name; a *roles* table
(`prefill_device_list`, `decode_device_list`) has the groups `prefill` and `decode`; a *groups* table
(`server_group_list`) has the groups that it names. `line` is where something stands in the file that was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from vllm_ascend_pd.errors import PDError

Format = Literal["pair", "roles", "groups"]
FORMATS: Final[tuple[Format, ...]] = ("pair", "roles", "groups")
VERSIONS: Final = ("1.0", "1.2")
PREFILL: Final = "prefill"
DECODE: Final = "decode"
# Groups tables count their groups: the router, prefill, decode.
GROUP_IDS: Final = {"router": "0", PREFILL: "1", DECODE: "2"}

Extras = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file. `field` is a path such as `server_list[0].device[3].rank_id`."""

    level: Literal["warn", "fail"]
    line: int
    field: str
    message: str
    action: str

    def __str__(self) -> str:
        where = f"line {self.line}" + (f", {self.field}" if self.field else "")
        return f"{where}: {self.message}; {self.action}"


class RankTableError(PDError):
    """A rank table is wrong, or cannot be made of these devices. Action: what the message says."""

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where something stands in the file that was read; nothing of it counts when two are compared."""

    line: int = field(default=0, compare=False)
    place: str = field(default="", compare=False)  # its path in the file
    field_lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    def line_of(self, name: str) -> int:
        """The line of a field; of the whole where the field is missing."""
        return self.field_lines.get(name, self.line)


@dataclass(frozen=True)
class TableDevice(Placed):
    """One rank. Empty texts are fields that are not in the file."""

    device_id: str
    device_ip: str = ""
    rank_id: str = ""
    cluster_id: str = ""
    super_device_id: str = ""
    super_pod_id: str = ""
    device_port: str = ""
    host_port: str = ""
    backup_device_ip: str = ""
    backup_device_port: str = ""
    device_logical_id: str = ""
    extras: Extras = ()


@dataclass(frozen=True)
class TableServer(Placed):
    """One host. In a roles table one run of devices of the same host."""

    server_id: str
    devices: tuple[TableDevice, ...] = ()
    host_ip: str = ""
    server_ip: str = ""
    extras: Extras = ()


@dataclass(frozen=True)
class TableGroup(Placed):
    """`group_id` as in the file; `prefill` and `decode` in a roles table, empty in a pair table."""

    group_id: str
    servers: tuple[TableServer, ...] = ()

    @property
    def title(self) -> str:
        """What people call it."""
        names = {number: name for name, number in GROUP_IDS.items()}
        return names.get(self.group_id, self.group_id)


@dataclass(frozen=True)
class RankTable(Placed):
    """A whole file."""

    format: Format
    version: str
    groups: tuple[TableGroup, ...]
    status: str = "completed"
    extras: Extras = ()

    def rows(self) -> Iterator[tuple[TableGroup, TableServer, TableDevice]]:
        """All devices in the order of the file."""
        for group in self.groups:
            for server in group.servers:
                for device in server.devices:
                    yield group, server, device

    @property
    def server_ids(self) -> tuple[str, ...]:
        """Each server once, in the order of the file."""
        return tuple(dict.fromkeys(server.server_id for group in self.groups for server in group.servers))

    @property
    def has_super_pods(self) -> bool:
        """Whether any device has an id in a super node."""
        return any(device.super_device_id or device.super_pod_id for _, _, device in self.rows())
