# SPDX-License-Identifier: Apache-2.0
"""Plain values: one device, all devices, and what was found wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from vllm_ascend_pd.wire import DeviceAddress

Generation = Literal["a2", "a3", "other"]
Level = Literal["warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: about what, what was seen, what to do. `code` is for programs."""

    level: Level
    subject: str
    seen: str
    action: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.seen}; {self.action}"


@dataclass(frozen=True)
class DeviceFacts:
    """One NPU (on A3: one die). See `numbering` for the three ids."""

    logical_id: int | None  # None: hidden by ASCEND_RT_VISIBLE_DEVICES
    container_id: int
    physical_id: int
    card: int  # `NPU ID` and `Chip ID`: what npu-smi takes as -i and -c
    chip: int
    chip_name: str
    generation: Generation
    physical_source: str
    hccn_id: int = -1  # what hccn_tool takes as -i; -1: not found out
    nic_ip: str = ""  # of the chip's own port
    vnic_ip: str = ""  # A3: in the super node's network
    device_ip: str = ""  # the one of the two that goes into rank tables
    ip_source: str = ""
    super_device_id: str = ""
    super_pod_id: str = ""
    server_index: str = ""

    @property
    def soc(self) -> Generation:
        """a2, a3 or other."""
        return self.generation

    def replace(self, **changes: Any) -> DeviceFacts:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)

    def address(self, server_id: str) -> DeviceAddress:
        """What is told to peers.

        Raises:
            ValueError: this process cannot see the device.
        """
        if self.logical_id is None:
            raise ValueError(f"NPU {self.physical_id} is hidden from this process")
        return DeviceAddress(
            server_id=server_id,
            logical_id=self.logical_id,
            physical_id=self.physical_id,
            device_ip=self.device_ip,
            super_device_id=self.super_device_id,
            super_pod_id=self.super_pod_id,
        )


@dataclass(frozen=True)
class Inventory:
    """Devices in logical order, the hidden ones last."""

    generation: Generation
    devices: tuple[DeviceFacts, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def visible(self) -> tuple[DeviceFacts, ...]:
        """Those that this process can use."""
        return tuple(device for device in self.devices if device.logical_id is not None)
