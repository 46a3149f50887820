# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while asking the system about its NPUs. Each message names the command and what to do."""

from __future__ import annotations

from vllm_ascend_pd.errors import PDError


class DeviceError(PDError):
    """The NPUs of this host cannot be read as they must. Action: what the message says."""


class NoDevicesError(DeviceError):
    """There is no NPU here, or this container was given none. Action: give it devices, or serve on the CPU."""


class ToolMissingError(DeviceError):
    """A tool of the driver is not here. Action: mount it into the container."""


class CommandError(DeviceError):
    """A tool failed or did not end in time. Action: run the named command by hand."""


class UnknownOutputError(DeviceError):
    """A tool printed something that is in none of the known formats. Action: report the named line."""

    def __init__(self, command: str, line: str, expected: str, number: int = 0) -> None:
        where = f"`{command}`" + (f" line {number}" if number else "")
        shown = line if len(line) <= 200 else line[:200] + "…"
        super().__init__(
            f"{where}: expected {expected}, found {shown!r}; this driver's tools print a format that is not known "
            "here: report the whole output, and name the devices in a rank table by hand (`vllm pd ranktable check`) "
            "until then"
        )
        self.command = command
        self.line = line
