# SPDX-License-Identifier: Apache-2.0
"""Three ways to count the same NPUs, and how they map onto each other.

- *physical*: as the host's driver counts; `/dev/davinci<N>`, `/etc/hccn.conf` and rank tables use it;
- *container*: 0, 1, … over the devices that this container was given (`Chip Logic ID`); the numbers in
  `ASCEND_RT_VISIBLE_DEVICES` are these. On a host, container and physical ids are the same;
- *logical*: position in `ASCEND_RT_VISIBLE_DEVICES`; what `torch.npu.set_device` takes.

With cards 4 and 7 given to a container and `ASCEND_RT_VISIBLE_DEVICES=1`, the one device is logical 0, container 1,
physical 7. Mixing them up is vllm-ascend issue 2618: a table with the wrong kind either finds no device or fails to
link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from vllm_ascend_pd.ascend.devices.errors import DeviceError
from vllm_ascend_pd.ascend.devices.outputs import ChipRow, parse_remap
from vllm_ascend_pd.ascend.devices.system import System

VISIBLE_VARIABLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
_DAVINCI: Final = re.compile(r"davinci(\d{1,6})")


def davinci_ids(system: System) -> list[int]:
    """Numbers of `/dev/davinci<N>`, ascending."""
    matches = (_DAVINCI.fullmatch(name) for name in system.names_in("/dev"))
    return sorted(int(match[1]) for match in matches if match)


def read_visible(value: str | None, container_ids: Sequence[int], physical_ids: Sequence[int]) -> list[int]:
    """Container ids in logical order. Without the variable: all of them.

    Raises:
        DeviceError: it names something that is no device of this container.
    """
    if value is None or not value.strip():
        return sorted(container_ids)
    chosen: list[int] = []
    for word in (part.strip() for part in value.split(",")):
        if not word.isdecimal() or len(word) > 6:
            raise DeviceError(f"{VISIBLE_VARIABLE}={value!r}: {word!r} is not a number; write ids as 0,1,2")
        if int(word) in chosen:
            raise DeviceError(f"{VISIBLE_VARIABLE}={value!r}: {word} is there twice; write each id once")
        chosen.append(int(word))
    strangers = [number for number in chosen if number not in container_ids]
    if strangers:
        hint = ""
        if all(number in physical_ids for number in chosen):
            hint = (
                " (these are the host's numbers; inside the container write "
                + ",".join(str(container_ids[list(physical_ids).index(number)]) for number in chosen)
                + ")"
            )
        raise DeviceError(
            f"{VISIBLE_VARIABLE}={value!r} names device {strangers[0]}, but the devices here are numbered "
            f"{_spans(container_ids)}{hint}; correct it or leave it unset"
        )
    return chosen


def physical_ids(system: System, rows: Sequence[ChipRow]) -> tuple[list[int], str]:
    """The physical id of each row (all have a container id), and where it was read.

    Raises:
        DeviceError: the driver does not tell, and `/dev` does not fit.
    """
    known = [row.physical for row in rows if row.physical is not None]
    if len(known) == len(rows):
        _require_unique(known, "npu-smi info -m, column Chip Phy-ID")
        return known, "npu-smi info -m"
    devices = davinci_ids(system)
    logic = [row.logic for row in rows]
    if devices == list(range(len(rows))) == sorted(number for number in logic if number is not None):
        # As many device files as chips, numbered alike from 0. A container that was given cards 0..n-1 looks the same.
        return [number for number in logic if number is not None], "/dev/davinci*"
    remapped = _ask_remap(system, rows, devices)
    if remapped is not None:
        return remapped, "npu-smi info -t phyid-remap"
    if len(devices) != len(rows):
        raise DeviceError(
            f"npu-smi shows {len(rows)} chips, /dev has {len(devices)} davinci devices "
            f"({_spans(devices) or 'none'}), and this npu-smi does not print physical ids: give the container exactly "
            "the /dev/davinci<N> of its cards, under the names that they have on the host"
        )
    order = sorted(range(len(rows)), key=lambda index: logic[index] or 0)
    result = [0] * len(rows)
    for number, index in zip(devices, order, strict=True):
        result[index] = number
    return result, "order of /dev/davinci*"


def _ask_remap(system: System, rows: Sequence[ChipRow], devices: Sequence[int]) -> list[int] | None:
    places: dict[tuple[int, int], int] = {}
    for physical in devices:
        place = parse_remap(system.call("npu-smi", "info", "-t", "phyid-remap", "-p", str(physical)))
        if place is None:
            return None  # an npu-smi without this query answers none of them
        places[place] = physical
    found = [places.get((row.card, row.chip)) for row in rows]
    complete = [number for number in found if number is not None]
    return complete if len(complete) == len(rows) and len(set(complete)) == len(rows) else None


def _require_unique(numbers: Sequence[int], source: str) -> None:
    for number in numbers:
        if numbers.count(number) > 1:
            raise DeviceError(f"{source}: physical id {number} is there twice; report this output")


def _spans(numbers: Sequence[int]) -> str:
    """`0..3, 6` for 0, 1, 2, 3, 6."""
    parts: list[str] = []
    ordered = sorted(numbers)
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            first, last = ordered[start], ordered[index - 1]
            parts.append(str(first) if first == last else f"{first}..{last}")
            start = index
    return ", ".join(parts)
