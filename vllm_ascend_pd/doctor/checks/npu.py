# SPDX-License-Identifier: Apache-2.0
"""The NPUs of this host: devices and their ids, health, network ports, `hccn.conf`, TLS switch, environment, memory.

`read_npus` asks `ascend.devices`, which calls the driver's tools; the rest judges what it said. Tested on recorded
output; not run on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ascend_pd.ascend import devices
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.datadist import environment
from vllm_ascend_pd.doctor.check import Check, fail, not_applicable, ok, warn
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.transfer.staging.reserve import LINKS_EXPECTED, reserved_device_bytes

CHATTY_LEVELS = ("0", "1")  # debug, info
NO_NPU = "no NPU is visible (/dev/davinci*)"


@dataclass(frozen=True)
class NpuFacts:
    """What the tools said. With an `error` there is nothing else."""

    inventory: devices.Inventory | None = None
    health: tuple[devices.ChipHealth, ...] = ()
    links: tuple[devices.LinkState, ...] = ()
    tls: tuple[devices.TlsSwitch, ...] = ()
    hccn: devices.HccnConf | None = None
    error: str = ""

    @property
    def tls_by_device(self) -> dict[str, bool | None]:
        """For a comparison with a peer."""
        return {str(switch.device.physical_id): switch.on for switch in self.tls}


def read_npus(host: Host, system: devices.System | None = None) -> NpuFacts | None:
    """Ask the tools, some tenths of a second for each device; None on a host without NPUs."""
    if system is None and host.count_npus() == 0:
        return None
    system = system or devices.System(root=host.root, environ=host.environ)
    try:
        inventory = devices.inventory(system)
        return NpuFacts(
            inventory,
            tuple(devices.npu_health(inventory, system)),
            tuple(devices.link_state(inventory, system)),
            tuple(devices.tls_switch(inventory, system)),
            devices.hccn_conf(system),
        )
    except devices.NoDevicesError:
        return None
    except devices.DeviceError as error:
        return NpuFacts(error=str(error))


def check_npus(host: Host, facts: NpuFacts | None) -> list[Check]:
    """One line for each subject."""
    if facts is None:
        return [not_applicable("npu.devices", f"{NO_NPU}: KV moves between CPU instances")]
    if facts.inventory is None or facts.hccn is None:
        return [fail("npu.devices", facts.error, "repair it and run the doctor again")]
    return [
        _check_devices(facts.inventory),
        _check_ids(facts.inventory),
        _check_health(facts.health),
        _check_network(facts.inventory, facts.links),
        check_hccn_conf(facts.hccn, facts.inventory.generation),
        _check_tls(facts.tls),
        check_environment(host),
        _check_memory(),
    ]


def _check_devices(found: devices.Inventory) -> Check:
    key = "npu.devices"
    seen = f"{len(found.visible)} of {len(found.devices)} chips ({found.generation.upper()}) are this process's"
    if not found.visible:
        return fail(key, seen, f"unset {devices.VISIBLE_VARIABLE}, or name devices that exist")
    return _with_findings(key, seen, (item for item in found.findings if not _is_about_address(item)))


def _is_about_address(finding: devices.Finding) -> bool:
    return finding.subject.endswith("address") or finding.code in ("no_ip", "no_vnic", "ip_unreadable", "stale_conf")


def _with_findings(key: str, seen: str, findings: Iterable[devices.Finding]) -> Check:
    """`seen` when nothing was found; else what was, by the worst level."""
    found = sorted(findings, key=lambda finding: finding.level != "fail")
    if not found:
        return ok(key, seen)
    told = "; ".join(f"{finding.subject}: {finding.seen}" for finding in found)
    todo = "; ".join(dict.fromkeys(finding.action for finding in found if finding.action))
    return fail(key, told, todo) if found[0].level == "fail" else warn(key, f"{seen}; {told}", todo)


def _check_ids(found: devices.Inventory) -> Check:
    """A rank table wants physical ids; a container counts from 0."""
    key, physical = "npu.ids", [device.physical_id for device in found.devices]
    if len(set(physical)) != len(physical):
        todo = "the container's mapping cannot be resolved: mount npu-smi and /usr/local/dcmi from the host"
        return fail(key, f"two devices have one physical id: {sorted(physical)}", todo)
    pairs = ", ".join(f"{device.logical_id} is {device.physical_id}" for device in found.visible)
    source = ", ".join(dict.fromkeys(device.physical_source for device in found.visible))
    return ok(key, f"logical and physical: {pairs} (from {source})")


def _check_health(found: tuple[devices.ChipHealth, ...]) -> Check:
    key = "npu.health"
    bad = [chip for chip in found if not chip.ok]
    if not bad:
        return ok(key, f"{len(found)} chips say OK")
    seen = "; ".join(
        f"NPU {chip.device.physical_id}: {chip.status or 'not readable'} {chip.detail}".strip() for chip in bad
    )
    if all(chip.status.upper() in ("", "WARNING", "UNKNOWN") for chip in bad):
        return warn(key, seen, "npu-smi info -t health -i CARD -c CHIP, and the driver's log, say more")
    return fail(key, seen, "take these chips out of service; the host's administrator resets them")


def _check_network(found: devices.Inventory, links: tuple[devices.LinkState, ...]) -> Check:
    key = "npu.network"
    about = [finding for finding in found.findings if _is_about_address(finding)]
    seen = ", ".join(f"{device.physical_id}: {device.device_ip or 'no address'}" for device in found.visible)
    if about:
        return _with_findings(key, seen, about)
    down = [str(link.device.physical_id) for link in links if link.up is False]
    if down and found.generation != "a3":  # an A3 without optics links within its super node all the same
        return warn(
            key,
            f"{seen}; the port of NPU {', '.join(down)} is reported down",
            "check cable and switch: hccn_tool -i N -link -g",
        )
    return ok(key, seen)


def check_hccn_conf(conf: devices.HccnConf, generation: str = "") -> Check:
    """HCCL reads it in every process. On A3 the links of one super node do without."""
    key = "npu.hccn-conf"
    if not conf.present:
        seen = f"{conf.path} is not here: HCCL does not find the addresses of the NPUs' own ports"
        todo = f"in a container: docker -v {conf.path}:{conf.path}:ro; on a host, set the addresses with hccn_tool"
        return fail(key, seen, todo) if generation == "a2" else warn(key, seen, todo)
    if conf.problems:
        return fail(key, f"{conf.path} " + "; ".join(conf.problems), "correct the line on the host")
    return ok(key, f"{conf.path} has {len(conf.addresses)} addresses")


def _check_tls(found: tuple[devices.TlsSwitch, ...]) -> Check:
    key = "npu.tls-switch"
    unread = [switch for switch in found if switch.on is None]
    if unread or not found:
        seen = f"cannot be read: {unread[0].detail}" if unread else "no device to ask"
        return warn(key, seen, "look by hand, it must be alike on all hosts: hccn_tool -i N -tls -g")
    if len({switch.on for switch in found}) > 1:
        on = ", ".join(str(switch.device.physical_id) for switch in found if switch.on)
        return fail(key, f"on for NPU {on} and off for the others", "set it alike: hccn_tool -i N -tls -s enable 0")
    return ok(key, f"{'on' if found[0].on else 'off'} on all chips (must be the same on all hosts)")


def check_environment(host: Host) -> Check:
    """Variables that CANN reads."""
    key, environ = "npu.environment", host.environ
    if host.count_npus() == 0:
        return not_applicable(key, f"{NO_NPU}: HCCL_* and ASCEND_* have no effect")
    try:
        environment.check_environment(environ)
    except PDConfigError as error:
        seen, _, todo = str(error).partition(": ")
        return fail(key, seen, todo)
    visible = environ.get(devices.VISIBLE_VARIABLE, "")
    words = [word.strip() for word in visible.split(",") if word.strip()]
    if len(set(words)) != len(words):
        return fail(key, f"{devices.VISIBLE_VARIABLE}={visible} names a device twice", "name each device once")
    intra = environ.get("HCCL_INTRA_ROCE_ENABLE", "0")
    if intra not in ("0", "1"):
        return fail(key, f"HCCL_INTRA_ROCE_ENABLE={intra}", "set it to 0 or 1, alike on all hosts")
    level = environ.get("ASCEND_GLOBAL_LOG_LEVEL", "3")
    if level in CHATTY_LEVELS:
        return warn(key, f"ASCEND_GLOBAL_LOG_LEVEL={level}", "debug and info logs slow transfers down: set it to 3")
    shown = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith("HCCL_")]
    return ok(key, ", ".join(shown) or "no HCCL_* variable is set")


def _check_memory() -> Check:
    """What the data plane keeps for itself before the KV cache is sized, by role."""
    key = "npu.memory"
    told = ", ".join(f"{reserved_device_bytes(_config(role)) >> 20} MiB on {role.value}" for role in PDRole)
    return ok(
        key,
        f"of each chip are kept beside the KV cache: {told} (staging and {LINKS_EXPECTED} links, an estimate), and "
        "2 MiB for each KV tensor",
    )


def _config(role: PDRole) -> PDConfig:
    return PDConfig(role=role, engine_id="doctor", epoch="", runtime_dir="")
