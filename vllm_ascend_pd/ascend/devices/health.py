# SPDX-License-Identifier: Apache-2.0
"""What the doctor asks about each device: health, the TLS switch, the state of its network port."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from vllm_ascend_pd.ascend.devices.errors import DeviceError
from vllm_ascend_pd.ascend.devices.facts import DeviceFacts, Inventory
from vllm_ascend_pd.ascend.devices.hccn import parse_state, parse_tls
from vllm_ascend_pd.ascend.devices.outputs import parse_health
from vllm_ascend_pd.ascend.devices.system import System


@dataclass(frozen=True)
class ChipHealth:
    """`status`: OK, Warning, Alarm, Critical, UNKNOWN as the driver says; "" when it could not be read (`detail`)."""

    device: DeviceFacts
    status: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the driver calls it OK."""
        return self.status.upper() == "OK"


@dataclass(frozen=True)
class TlsSwitch:
    """`on` is None when it could not be read. Devices with and without TLS cannot be linked."""

    device: DeviceFacts
    on: bool | None
    detail: str = ""


@dataclass(frozen=True)
class LinkState:
    """`up` is None when it could not be read; `network` is the driver's word about reachability ("Success", "Init").

    Some hosts report DOWN although all works within the super node: a warning, no verdict.
    """

    device: DeviceFacts
    up: bool | None
    network: str = ""
    detail: str = ""


def npu_health(found: Inventory, system: System | None = None) -> list[ChipHealth]:
    """Health of the visible devices."""
    system = system or System()
    result: list[ChipHealth] = []
    for device in found.visible:
        arguments = ("info", "-t", "health", "-i", str(device.card), "-c", str(device.chip))
        try:
            status, codes = parse_health(system.call("npu-smi", *arguments), " ".join(("npu-smi", *arguments)))
        except DeviceError as error:
            result.append(ChipHealth(device, "", str(error)))
            continue
        result.append(ChipHealth(device, status, f"error code {codes}" if codes else ""))
    return result


def tls_switch(found: Inventory, system: System | None = None) -> list[TlsSwitch]:
    """The TLS switch of the visible devices."""
    system = system or System()
    result: list[TlsSwitch] = []
    for device in found.visible:
        number = _hccn_id(device)
        command = f"hccn_tool -i {number} -tls -g"
        try:
            on = parse_tls(system.call("hccn_tool", "-i", str(number), "-tls", "-g"), command)
            result.append(TlsSwitch(device, on))
        except DeviceError as error:
            result.append(TlsSwitch(device, None, str(error)))
    return result


def link_state(found: Inventory, system: System | None = None) -> list[LinkState]:
    """The network port of the visible devices. A3 without optics has none and reports DOWN."""
    system = system or System()
    result: list[LinkState] = []
    for device in found.visible:
        number = str(_hccn_id(device))
        try:
            link = parse_state(
                system.call("hccn_tool", "-i", number, "-link", "-g"), f"hccn_tool -i {number} -link -g", "link status"
            )
            network = parse_state(
                system.call("hccn_tool", "-i", number, "-net_health", "-g"),
                f"hccn_tool -i {number} -net_health -g",
                "net health status",
            )
            result.append(LinkState(device, link.upper() == "UP", network))
        except DeviceError as error:
            result.append(LinkState(device, None, "", str(error)))
    return result


def local_addresses(system: System | None = None) -> set[str]:
    """All addresses of this network namespace, as the kernel lists them."""
    system = system or System()
    found: set[str] = set()
    previous = ""
    for line in (system.read_text("/proc/net/fib_trie") or "").splitlines():
        stripped = line.strip()
        if stripped.endswith("/32 host LOCAL"):
            found.add(previous)
        previous = stripped.removeprefix("|--").strip()
    for line in (system.read_text("/proc/net/if_inet6") or "").splitlines():
        digits = line.split(" ", 1)[0]
        if len(digits) == 32:
            try:
                found.add(str(ipaddress.IPv6Address(int(digits, 16))))
            except ValueError:
                continue
    return found


def _hccn_id(device: DeviceFacts) -> int:
    return device.hccn_id if device.hccn_id >= 0 else device.physical_id
