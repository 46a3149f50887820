# SPDX-License-Identifier: Apache-2.0
"""Which IP address each NPU has: from `hccn_tool`, else from `/etc/hccn.conf`.

What the tool says is what the driver uses, so it wins; the file can be stale. The file counts by physical ids. Whether
the tool does so too inside a container with other cards than 0..n-1 differs by driver, so it is asked once.
"""

from __future__ import annotations

from typing import Final

from vllm_ascend_pd.ascend.devices.errors import DeviceError, ToolMissingError
from vllm_ascend_pd.ascend.devices.facts import DeviceFacts, Finding, Generation
from vllm_ascend_pd.ascend.devices.hccn import HccnConf, is_no_such_device, parse_address
from vllm_ascend_pd.ascend.devices.system import System

_NIC: Final = ("-ip", "ipaddr")
_VNIC: Final = ("-vnic", "vnic ipaddr")


class AddressReader:
    """Reads addresses of one machine's devices; collects what is wrong in `findings`. One thread."""

    def __init__(
        self,
        system: System,
        conf: HccnConf,
        generation: Generation,
        network: str,
        physical_by_container: dict[int, int],
    ) -> None:
        self.findings: list[Finding] = []
        self._system = system
        self._conf = conf
        self._wants_vnic = network == "hccs" or (network == "auto" and generation == "a3")
        self._has_tool = system.find_tool("hccn_tool") is not None
        self._physical = physical_by_container
        self._by_physical: bool | None = None  # how hccn_tool counts

    def add_addresses(self, facts: DeviceFacts) -> DeviceFacts:
        """`facts` with its addresses, or without and with a finding."""
        stored = self._conf.addresses.get(facts.physical_id, "")
        facts = facts.replace(nic_ip=stored)
        if not self._has_tool:
            return self._from_conf(facts, stored)
        try:
            facts = facts.replace(hccn_id=self._hccn_id(facts))
            address = self._ask(facts.hccn_id, _VNIC if self._wants_vnic else _NIC)
        except DeviceError as error:
            self._fail(facts, str(error), "", "ip_unreadable")
            return facts
        if address is None:
            action = (
                "its address in the super node is set by the driver: check the driver and `hccn_tool -i N -vnic -g`"
                if self._wants_vnic
                else f"configure one on the host: hccn_tool -i {facts.physical_id} -ip -s address A netmask M"
            )
            self._fail(facts, "no IP address is configured", action, "no_ip")
            return facts
        if self._wants_vnic:
            return facts.replace(vnic_ip=address, device_ip=address, ip_source="hccn_tool -vnic")
        if stored and stored != address:
            seen = f"hccn_tool says {address}, {self._conf.path} says {stored}"
            action = "the first is used; write it into the file, CANN reads that first"
            self.findings.append(Finding("warn", f"NPU {facts.physical_id} address", seen, action, "stale_conf"))
        return facts.replace(nic_ip=address, device_ip=address, ip_source="hccn_tool -ip")

    def _from_conf(self, facts: DeviceFacts, stored: str) -> DeviceFacts:
        subject = f"NPU {facts.physical_id} address"
        if not stored:
            missing = "has no line for it" if self._conf.present else "is not there"
            self._fail(
                facts,
                f"hccn_tool is not here and {self._conf.path} {missing}",
                "mount /usr/local/Ascend/driver/tools/hccn_tool and /etc/hccn.conf from the host",
                "no_ip",
            )
            return facts
        if self._wants_vnic:
            seen = f"hccn_tool is not here; {self._conf.path} knows only the address of its own port, {stored}"
            action = "mount /usr/local/Ascend/driver/tools/hccn_tool: links over HCCS need the virtual address"
            self.findings.append(Finding("warn", subject, seen, action, "no_vnic"))
        return facts.replace(device_ip=stored, ip_source=self._conf.path)

    def _hccn_id(self, facts: DeviceFacts) -> int:
        """What hccn_tool calls this device."""
        if all(container == physical for container, physical in self._physical.items()):
            return facts.physical_id
        if self._by_physical is None:
            self._by_physical = self._find_numbering()
        return facts.physical_id if self._by_physical else facts.container_id

    def _find_numbering(self) -> bool:
        """Ask about a physical id that is no container id: only a tool that counts as the host does knows it."""
        telling = sorted(set(self._physical.values()) - set(self._physical))
        if not telling:
            pairs = ", ".join(f"{container}={physical}" for container, physical in sorted(self._physical.items()))
            seen = f"container and physical ids are the same numbers in another order ({pairs})"
            action = "hccn_tool is asked by physical ids; compare its answers with the host's"
            self.findings.append(Finding("warn", "hccn_tool", seen, action, "ambiguous_ids"))
            return True
        try:
            result = self._system.call("hccn_tool", "-i", str(telling[0]), _NIC[0], "-g")
        except ToolMissingError:
            return True
        return not is_no_such_device(result)

    def _ask(self, hccn_id: int, what: tuple[str, str]) -> str | None:
        option, key = what
        command = f"hccn_tool -i {hccn_id} {option} -g"
        return parse_address(self._system.call("hccn_tool", "-i", str(hccn_id), option, "-g"), command, key)

    def _fail(self, facts: DeviceFacts, seen: str, action: str, code: str) -> None:
        action = action or "repair that, then start again"
        self.findings.append(Finding("fail", f"NPU {facts.physical_id} address", seen, action, code))
