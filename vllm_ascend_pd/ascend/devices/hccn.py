# SPDX-License-Identifier: Apache-2.0
"""Pure: what `hccn_tool -i N …` prints, and what `/etc/hccn.conf` holds.

`/etc/hccn.conf` counts devices as the host does (`address_<physical id>=…`), also when it is mounted into a container.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.ascend.devices.errors import CommandError, UnknownOutputError
from vllm_ascend_pd.ascend.devices.outputs import parse_fields
from vllm_ascend_pd.ascend.devices.system import CommandResult, System

CONF_PATH: Final = "/etc/hccn.conf"
_ADDRESS_LINE: Final = re.compile(r"address_(\d{1,6})\s*=\s*(\S*)\s*")
_TLS: Final = re.compile(r"tls switch\s*\[\s*([01])\s*\]", re.IGNORECASE)


@dataclass(frozen=True)
class HccnConf:
    """`addresses` by physical id; `problems` are lines that could not be read, with their number."""

    present: bool
    addresses: dict[int, str]
    problems: tuple[str, ...] = ()
    path: str = CONF_PATH


def hccn_conf(system: System | None = None) -> HccnConf:
    """Read `/etc/hccn.conf`.

    Raises:
        DeviceError: it is there and this user may not read it.
    """
    text = (system or System()).read_text(CONF_PATH)
    return HccnConf(False, {}) if text is None else parse_conf(text)


def parse_conf(text: str) -> HccnConf:
    """`address_N=IP` lines; all other settings in the file are of no use here."""
    addresses: dict[int, str] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _ADDRESS_LINE.fullmatch(line.strip())
        if match is None:
            continue
        physical, address = int(match[1]), match[2]
        if not is_address(address):
            problems.append(f"line {number}: address_{physical} is {address!r}, not an IP address")
        elif addresses.get(physical, address) != address:
            problems.append(f"line {number}: address_{physical} is given twice: {addresses[physical]} and {address}")
        else:
            addresses[physical] = address
    return HccnConf(True, addresses, tuple(problems))


def parse_address(result: CommandResult, command: str, key: str = "ipaddr") -> str | None:
    """The address after `ipaddr:` or `vnic ipaddr:`; None when the device has none.

    Raises:
        CommandError: the tool failed for another reason.
        UnknownOutputError: neither an address nor a known refusal.
    """
    address = parse_fields(result.text).get(key)
    if address is not None:
        if not is_address(address):
            raise UnknownOutputError(command, f"{key}:{address}", "an IP address")
        return None if ipaddress.ip_address(address).is_unspecified else address
    lowered = result.text.lower()
    if "no ip was preset" in lowered:
        return None
    raise refusal(result, command, f"`{key}:…`")


def is_no_such_device(result: CommandResult) -> bool:
    """Whether the tool says that there is no device with this number."""
    lowered = result.text.lower()
    return any(words in lowered for words in ("not exist", "invalid device", "chip is invalid", "not in the range"))


def parse_tls(result: CommandResult, command: str) -> bool:
    """Whether TLS is switched on. A device without a certificate has it off.

    Raises:
        CommandError, UnknownOutputError: no answer to that.
    """
    match = _TLS.search(result.text)
    if match is not None:
        return match[1] == "1"
    if "no certificate found" in result.text.lower():
        return False
    raise refusal(result, command, "`tls switch[0|1]`")


def parse_state(result: CommandResult, command: str, key: str) -> str:
    """The word after `link status:` or `net health status:`.

    Raises:
        CommandError, UnknownOutputError: it is not there.
    """
    value = parse_fields(result.text).get(key)
    if value is None:
        raise refusal(result, command, f"`{key}: …`")
    return value


def refusal(result: CommandResult, command: str, expected: str) -> CommandError | UnknownOutputError:
    """The error for an answer without the wanted field."""
    shown = next((line.strip() for line in result.text.splitlines() if line.strip()), "")
    lowered = shown.lower()
    if "permission denied" in lowered:
        return CommandError(
            f"`{command}` says {shown!r}; run it as root or as a member of the driver's group (HwHiAiUser), and in a "
            "container that may ask the driver"
        )
    if result.code != 0 or "failed" in lowered or "not exist" in lowered or "not support" in lowered:
        return CommandError(f"`{command}` failed (exit {result.code}): {shown or 'it printed nothing'}")
    return UnknownOutputError(command, shown, expected)


def is_address(text: str) -> bool:
    """Whether it is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
