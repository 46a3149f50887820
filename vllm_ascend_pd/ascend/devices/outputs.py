# SPDX-License-Identifier: Apache-2.0
"""Pure: what `npu-smi info …` prints, as values. Formats known from public descriptions; see docs/ranktable.md.

`-m` has a header whose columns vary by driver (`Chip Logic ID`, `Chip Phy-ID`, `Slot ID`); the others print
`key : value` lines. Whatever is not understood raises with its line: a guess would send KV to the wrong chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.ascend.devices.errors import CommandError, UnknownOutputError
from vllm_ascend_pd.ascend.devices.system import CommandResult

_HEADERS: Final = re.compile(r"Chip Logic ID|Chip Phy-?ID|Chip Name|Slot ID|Chip ID|NPU ID", re.IGNORECASE)
_ABSENT: Final = ("-", "NA", "N/A")
_NO_ID: Final = str(0xFFFFFFFF)  # the driver's "none", printed unsigned


@dataclass(frozen=True)
class ChipRow:
    """One compute chip of `npu-smi info -m`. None: the column is missing or empty."""

    card: int
    chip: int
    logic: int | None
    physical: int | None
    name: str


@dataclass(frozen=True)
class SuperPodPlace:
    """`-t spod-info`. Empty texts: this chip is in no super pod."""

    super_device_id: str
    super_pod_id: str
    server_index: str


def parse_mapping(text: str, command: str) -> list[ChipRow]:
    """Compute chips in the order printed; management controllers (Mcu) are left out.

    Raises:
        UnknownOutputError: no header, or a row that does not fit it.
    """
    columns: list[str] = []
    rows: list[ChipRow] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not columns:
            columns = _read_header(line)
            continue
        row = _read_row(columns, line, command, number)
        if row is not None:
            rows.append(row)
    if not columns:
        shown = text.strip().splitlines()[0] if text.strip() else ""
        raise UnknownOutputError(command, shown, "a header with `NPU ID`, `Chip ID` and `Chip Name`")
    return rows


def _read_header(line: str) -> list[str]:
    found = [match.lower().replace("phyid", "phy-id") for match in _HEADERS.findall(line)]
    complete = {"npu id", "chip id", "chip name"} <= set(found) and found[-1] == "chip name"
    return found if complete else []


def _read_row(columns: list[str], line: str, command: str, number: int) -> ChipRow | None:
    words = line.split(None, len(columns) - 1)
    if len(words) != len(columns):
        raise UnknownOutputError(command, line.strip(), f"{len(columns)} columns", number)
    cells = dict(zip(columns, (word.strip() for word in words), strict=True))
    name = cells["chip name"]
    if name.lower() == "mcu":
        return None

    def cell(column: str) -> int | None:
        value = cells.get(column, "-")
        if value in _ABSENT:
            return None
        if not value.isdecimal() or len(value) > 9:
            raise UnknownOutputError(command, line.strip(), f"a number or `-` under `{column}`", number)
        return int(value)

    card, chip = cell("npu id"), cell("chip id")
    if card is None or chip is None:
        raise UnknownOutputError(command, line.strip(), "numbers under `NPU ID` and `Chip ID`", number)
    # Newer generations have no logic id of their own: there the NPU id is the logical one.
    logic = cell("chip logic id") if "chip logic id" in cells else card
    return ChipRow(card=card, chip=chip, logic=logic, physical=cell("chip phy-id"), name=name)


def parse_fields(text: str) -> dict[str, str]:
    """`key : value` lines; the first of equal keys wins. Other lines are left out."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip():
            fields.setdefault(key.strip().lower(), value.strip())
    return fields


def parse_count(text: str, command: str) -> int:
    """`Total Count` of `npu-smi info -l`: cards.

    Raises:
        UnknownOutputError: the field is missing or no number.
    """
    value = parse_fields(text).get("total count", "")
    if not value.isdecimal():
        raise UnknownOutputError(command, f"Total Count: {value}" if value else _first_line(text), "`Total Count : N`")
    return int(value)


def parse_super_pod(result: CommandResult, command: str) -> SuperPodPlace | None:
    """Where a chip is in its super pod; None when the driver says that it has no such thing.

    Raises:
        UnknownOutputError: it answered something else.
    """
    fields = parse_fields(result.text)
    if "sdid" not in fields:
        if result.code != 0 or "not support" in result.text.lower():
            return None
        raise UnknownOutputError(command, _first_line(result.text), "`SDID : N` and `Super Pod ID : N`")
    device, pod = fields["sdid"], fields.get("super pod id", "")
    for name, value in (("SDID", device), ("Super Pod ID", pod)):
        if not value.isdecimal():
            raise UnknownOutputError(command, f"{name} : {value}", f"a number for `{name}`")
    if _NO_ID in (device, pod):
        return SuperPodPlace("", "", fields.get("server index", ""))
    return SuperPodPlace(device, pod, fields.get("server index", ""))


def parse_health(result: CommandResult, command: str) -> tuple[str, str]:
    """(status, error codes or empty) of `-t health`.

    Raises:
        CommandError, UnknownOutputError: no status in the answer.
    """
    fields = parse_fields(result.text)
    status = next((fields[key] for key in ("health status", "health", "healthy") if key in fields), "")
    if not status:
        if result.code != 0:
            raise CommandError(f"`{command}` failed (exit {result.code}): {_first_line(result.text)}")
        raise UnknownOutputError(command, _first_line(result.text), "`Health Status : …`")
    codes = fields.get("error code", "")
    return status, "" if codes in _ABSENT else codes


def parse_remap(result: CommandResult) -> tuple[int, int] | None:
    """(card, chip) of `-t phyid-remap -p N`; None when the driver does not know it."""
    fields = parse_fields(result.text)
    card, chip = fields.get("npu id", ""), fields.get("chip id", "")
    if result.code != 0 or not card.isdecimal() or not chip.isdecimal():
        return None
    return int(card), int(chip)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
