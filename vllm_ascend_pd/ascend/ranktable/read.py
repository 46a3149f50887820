# SPDX-License-Identifier: Apache-2.0
"""Pure: text to `RankTable`, in any of the three formats; what is wrong comes with line and field.

Tolerant where tables in the field are: numbers in place of texts, missing counts, unknown fields. Each is said. What
cannot be understood is a problem of level `fail`; reading goes on behind it, so that all are found in one run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from vllm_ascend_pd.ascend.ranktable.lines import Node, NotJson, parse
from vllm_ascend_pd.ascend.ranktable.model import (
    DECODE,
    PREFILL,
    Extras,
    Format,
    Problem,
    RankTable,
    RankTableError,
    TableDevice,
    TableGroup,
    TableServer,
)
from vllm_ascend_pd.errors import nearest

MAX_TEXT: Final = 256

_DEVICE_FIELDS: Final = (
    "device_id",
    "device_ip",
    "rank_id",
    "cluster_id",
    "super_device_id",
    "super_pod_id",
    "device_port",
    "host_port",
    "backup_device_ip",
    "backup_device_port",
    "device_logical_id",
)
_LISTS: Final = {
    "server_group_list": "groups",
    "prefill_device_list": "roles",
    "decode_device_list": "roles",
    "server_list": "pair",
}
_ROLE_LISTS: Final = ((PREFILL, "prefill_device_list"), (DECODE, "decode_device_list"))


@dataclass
class Scan:
    """What was read, and everything wrong with how it is written. `table` is None when nothing could be read."""

    table: RankTable | None = None
    problems: list[Problem] = field(default_factory=list)


def read_table(text: str) -> RankTable:
    """The table in `text`.

    Raises:
        RankTableError: the first problem of level `fail`; its message has the line, the field and what to do.
    """
    scan = scan_table(text)
    failures = [problem for problem in scan.problems if problem.level == "fail"]
    if failures or scan.table is None:
        raise RankTableError(str(failures[0]), failures[0])
    return scan.table


def scan_table(text: str) -> Scan:
    """As `read_table`, with all problems in place of an error."""
    try:
        root = parse(text)
    except NotJson as error:
        return Scan(None, [Problem("fail", error.line, "", str(error), "correct the file, or generate it again")])
    reader = _Reader()
    table = reader.read_root(root)
    problems = reader.all_problems()
    if table is None and not any(problem.level == "fail" for problem in problems):
        raise AssertionError("no table and no problem")
    return Scan(table, sorted(problems, key=lambda problem: problem.line))


class _Reader:
    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._numbers: list[tuple[int, str]] = []
        self._unknown: dict[str, tuple[int, int]] = {}  # name: first line, times

    def fail(self, node: Node, place: str, message: str, action: str) -> None:
        self.problems.append(Problem("fail", node.line, place, message, action))

    def all_problems(self) -> list[Problem]:
        """With one line for all numbers, and one for each unknown field."""
        found = list(self.problems)
        if self._numbers:
            line, place = self._numbers[0]
            message = f"{len(self._numbers)} values are numbers (this is the first)"
            found.append(Problem("warn", line, place, message, 'HCCL wants texts: write "0" in place of 0'))
        for name, (line, times) in self._unknown.items():
            message = f"unknown field{nearest(name, (*_DEVICE_FIELDS, *_LISTS, 'server_id', 'host_ip'))}"
            times_text = f" ({times} times)" if times > 1 else ""
            found.append(
                Problem("warn", line, name[:60], message + times_text, "it is kept and not used; is it meant?")
            )
        return found

    # ------------------------------------------------------------------ values

    def members(self, node: Node, place: str) -> dict[str, Node]:
        if isinstance(node.value, dict):
            return node.value
        self.fail(node, place, f"is {node.kind}", "write an object in braces")
        return {}

    def member(self, holder: Node, name: str) -> Node:
        """The named value, or its holder: to say a line."""
        return holder.value.get(name, holder) if isinstance(holder.value, dict) else holder

    def items(self, holder: Node, name: str, place: str, *, empty: bool = False) -> list[Node]:
        node = self.members(holder, place).get(name)
        if node is None:
            self.fail(holder, f"{place}{name}", "is missing", "add the list")
            return []
        if not isinstance(node.value, list):
            self.fail(node, f"{place}{name}", f"is {node.kind}", "write a list in brackets")
            return []
        if not node.value and not empty:
            self.fail(node, f"{place}{name}", "is empty", "list at least one")
        return node.value

    def text(self, holder: Node, name: str, place: str, *, required: bool = False) -> str:
        node = holder.value.get(name) if isinstance(holder.value, dict) else None
        if node is None:
            if required:
                self.fail(holder, f"{place}{name}", "is missing", "add it")
            return ""
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool):
            self._numbers.append((node.line, f"{place}{name}"))
            return str(value)
        if not isinstance(value, str):
            self.fail(node, f"{place}{name}", f"is {node.kind}", "write a text in quotes")
            return ""
        if len(value) > MAX_TEXT:
            self.fail(node, f"{place}{name}", f"has {len(value)} characters", f"at most {MAX_TEXT} are taken")
            return ""
        if required and not value:
            self.fail(node, f"{place}{name}", "is empty", "fill it in")
        return value

    def extras(self, holder: Node, known: tuple[str, ...], place: str) -> Extras:
        """Fields that are kept and not understood: texts only."""
        kept: list[tuple[str, str]] = []
        for name, node in self.members(holder, place).items():
            if name in known:
                continue
            line, times = self._unknown.get(name, (node.line, 0))
            self._unknown[name] = (line, times + 1)
            if isinstance(node.value, str) and len(node.value) <= MAX_TEXT and len(name) <= MAX_TEXT:
                kept.append((name, node.value))
        return tuple(kept)

    # ------------------------------------------------------------------ structure

    def read_root(self, root: Node) -> RankTable | None:
        if not isinstance(root.value, dict):
            self.fail(root, "", f"is {root.kind}", "a rank table is an object in braces")
            return None
        kinds = {_LISTS[name] for name in _LISTS if name in root.value}
        if len(kinds) != 1:
            what = "server_list, prefill_device_list and decode_device_list, or server_group_list"
            message = f"has lists of {len(kinds)} formats" if kinds else f"has no list of devices: {what}"
            self.fail(root, "", message, "keep the lists of one format, or generate the table again")
            return None
        kind: Format = "pair" if "pair" in kinds else "roles" if "roles" in kinds else "groups"
        groups = {"pair": self._read_pair, "roles": self._read_roles, "groups": self._read_groups}[kind](root)
        table = RankTable(
            format=kind,
            version=self.text(root, "version", "", required=True),
            status=self.text(root, "status", "") or "completed",
            groups=groups,
            extras=self.extras(root, ("version", "status", "server_count", "super_pod_list", *_LISTS), ""),
            line=root.line,
            field_lines=_field_lines(root),
        )
        if kind != "groups" or "server_count" in root.value:
            self._check_count(root, "", len(table.server_ids), required=kind == "pair")
        return table

    def _read_pair(self, root: Node) -> tuple[TableGroup, ...]:
        return (TableGroup("", self._read_servers(root, ""), line=root.line),)

    def _read_groups(self, root: Node) -> tuple[TableGroup, ...]:
        groups = []
        for number, node in enumerate(self.items(root, "server_group_list", "")):
            place = f"server_group_list[{number}]."
            group_id = self.text(node, "group_id", place, required=True)
            # The router's group has servers without devices, or none.
            servers = self._read_servers(node, place, devices_optional=True)
            self.extras(node, ("group_id", "server_count", "server_list", "super_pod_list"), place)
            if isinstance(node.value, dict) and "server_count" in node.value:
                self._check_count(node, place, len({server.server_id for server in servers}))
            groups.append(TableGroup(group_id, servers, line=node.line, place=place, field_lines=_field_lines(node)))
        return tuple(groups)

    def _read_roles(self, root: Node) -> tuple[TableGroup, ...]:
        groups = []
        for role, name in _ROLE_LISTS:
            servers: list[TableServer] = []
            for number, node in enumerate(self.items(root, name, "", empty=True)):
                place = f"{name}[{number}]."
                server_id = self.text(node, "server_id", place, required=True)
                device = self._read_device(node, place, ("server_id",))
                if servers and servers[-1].server_id == server_id:
                    servers[-1] = replace(servers[-1], devices=(*servers[-1].devices, device))
                else:
                    servers.append(
                        TableServer(server_id, (device,), line=node.line, place=place, field_lines=_field_lines(node))
                    )
            groups.append(TableGroup(role, tuple(servers), line=root.line))
        if not any(group.servers for group in groups):
            self.fail(root, "prefill_device_list", "both lists are empty", "list the devices")
        return tuple(groups)

    def _read_servers(self, holder: Node, place: str, *, devices_optional: bool = False) -> tuple[TableServer, ...]:
        servers = []
        for number, node in enumerate(self.items(holder, "server_list", place, empty=devices_optional)):
            here = f"{place}server_list[{number}]."
            devices: list[TableDevice] = []
            has_devices = isinstance(node.value, dict) and "device" in node.value
            if has_devices or not devices_optional:
                items = self.items(node, "device", here, empty=devices_optional)
                devices = [self._read_device(item, f"{here}device[{index}].") for index, item in enumerate(items)]
            servers.append(
                TableServer(
                    server_id=self.text(node, "server_id", here, required=True),
                    devices=tuple(devices),
                    host_ip=self.text(node, "host_ip", here),
                    server_ip=self.text(node, "server_ip", here),
                    extras=self.extras(node, ("server_id", "device", "host_ip", "server_ip"), here),
                    line=node.line,
                    place=here,
                    field_lines=_field_lines(node),
                )
            )
        return self._add_pods(holder, place, servers)

    def _read_device(self, node: Node, place: str, more: tuple[str, ...] = ()) -> TableDevice:
        values = {name: self.text(node, name, place, required=name == "device_id") for name in _DEVICE_FIELDS}
        extras = self.extras(node, (*_DEVICE_FIELDS, *more), place)
        return TableDevice(**values, extras=extras, line=node.line, place=place, field_lines=_field_lines(node))

    def _add_pods(self, holder: Node, place: str, servers: list[TableServer]) -> tuple[TableServer, ...]:
        """`super_pod_list` says per server what the other formats say per device."""
        if not isinstance(holder.value, dict) or "super_pod_list" not in holder.value:
            return tuple(servers)
        known = {server.server_id for server in servers}
        pods: dict[str, str] = {}
        names: set[str] = set()
        for number, node in enumerate(self.items(holder, "super_pod_list", place, empty=True)):
            here = f"{place}super_pod_list[{number}]."
            pod = self.text(node, "super_pod_id", here, required=True)
            if pod in names:
                self.fail(
                    self.member(node, "super_pod_id"),
                    f"{here}super_pod_id",
                    f"super pod {pod!r} is there twice",
                    "merge the entries",
                )
            names.add(pod)
            for index, entry in enumerate(self.items(node, "server_list", here)):
                spot = f"{here}server_list[{index}].server_id"
                its_line = self.member(entry, "server_id")
                server_id = self.text(entry, "server_id", spot.removesuffix("server_id"), required=True)
                if server_id not in known:
                    self.fail(its_line, spot, f"server {server_id!r} is not in server_list", "correct or remove it")
                if pods.get(server_id, pod) != pod:
                    seen = f"server {server_id!r} is in the super pods {pods[server_id]!r} and {pod!r}"
                    self.fail(its_line, spot, seen, "a server is in one super pod")
                pods.setdefault(server_id, pod)
        return tuple(
            replace(
                server,
                devices=tuple(
                    replace(device, super_pod_id=device.super_pod_id or pods.get(server.server_id, ""))
                    for device in server.devices
                ),
            )
            for server in servers
        )

    def _check_count(self, holder: Node, place: str, actual: int, *, required: bool = False) -> None:
        written = self.text(holder, "server_count", place, required=required)
        if written and written != str(actual):
            node = self.member(holder, "server_count")
            self.fail(
                node, f"{place}server_count", f"is {written}, but there are {actual} servers", f'write "{actual}"'
            )


def _field_lines(node: Node) -> dict[str, int]:
    return {name: member.line for name, member in node.value.items()} if isinstance(node.value, dict) else {}
