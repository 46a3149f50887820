# SPDX-License-Identifier: Apache-2.0
"""What two doctors tell each other about their hosts, and what must or should be alike. Pure but for `collect`."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from vllm_ascend_pd import __version__
from vllm_ascend_pd.ascend.pairing import PairingFacts
from vllm_ascend_pd.datadist.environment import COMPARED, TOLD
from vllm_ascend_pd.datadist.host.descriptors import read_boot_id
from vllm_ascend_pd.doctor.check import Check, fail, ok, warn
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.handshake import UNKNOWN
from vllm_ascend_pd.wire import WIRE_VERSION

ABSENT: Final = "(absent)"
# The handshake of two engines refuses these, by the same names. What one side could not read is equal to anything.
MUST_BE_EQUAL: Final = (
    "wire_version",
    "vllm_version",
    "fork_version",
    "byte_order",
    "data_plane",
    "cann",
    "vllm_ascend",
)
# Unlike values may work, and are the first thing to make equal when something does not.
SHOULD_BE_EQUAL: Final = ("chip", "torch", "torch_npu", "driver", "architecture")
# Of each host's own network and devices: unlike by nature.
_OWN: Final = frozenset({"HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "ASCEND_RT_VISIBLE_DEVICES"})


def collect(host: Host, pairing: PairingFacts, tls: Mapping[str, bool | None]) -> dict[str, Any]:
    """This host's facts; `tls` is the switch of each NPU's port. JSON-able, nothing secret."""
    return {
        "host": socket.gethostname(),
        "wire_version": WIRE_VERSION,
        "fork_version": __version__,
        "vllm_version": pairing.distribution or ABSENT,
        "byte_order": sys.byteorder,
        "data_plane": "cann" if host.count_npus() else "host",
        "architecture": platform.machine(),
        "chip": pairing.chip or ABSENT,
        "torch": pairing.torch or ABSENT,
        "torch_npu": pairing.torch_npu or ABSENT,
        "vllm_ascend": pairing.vllm_ascend or UNKNOWN,
        "cann": pairing.cann or UNKNOWN,
        "driver": pairing.driver or ABSENT,
        "environment": {name: host.environ[name] for name in (*COMPARED, *TOLD) if host.environ.get(name)},
        "tls": dict(tls),
        "boot_id": read_boot_id(),
        "network_namespace": _namespace("net"),
    }


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Check]:
    """One line each for versions, environment, TLS and the machine."""
    checks = [_compare_versions(ours, theirs), _compare_machines(ours, theirs)]
    if "cann" in (ours.get("data_plane"), theirs.get("data_plane")):
        checks += [_compare_environment(ours, theirs), _compare_tls(ours, theirs)]
    return checks


def _unlike(
    names: Iterable[str],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> str:
    found = []
    for name in names:
        mine, other = (facts.get(name, defaults.get(name, ABSENT)) for facts in (ours, theirs))
        if mine != other and UNKNOWN not in (mine, other):
            found.append(f"{name} is {mine} here and {other} there")
    return ", ".join(found)


def _compare_versions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    key = "peer.versions"
    if different := _unlike(MUST_BE_EQUAL, ours, theirs):
        return fail(key, different, "install the same release of vllm-ascend-pd on both; the handshake refuses this")
    if different := _unlike(SHOULD_BE_EQUAL, ours, theirs):
        return warn(key, different, "make them equal: prefill and decode compute the same tokens only with the same")
    return ok(key, f"vLLM {ours.get('vllm_version')}, wire {ours.get('wire_version')}, all else equal")


def _compare_environment(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    key = "peer.environment"
    mine, other = ours.get("environment") or {}, theirs.get("environment") or {}
    if different := _unlike(COMPARED, mine, other, COMPARED):
        return fail(key, different, "set it alike on both sides: the handshake refuses this")
    if different := _unlike((name for name in TOLD if name not in _OWN), mine, other):
        return warn(key, different, "set them alike on both sides")
    return ok(key, f"alike: {', '.join(f'{name}={value}' for name, value in mine.items()) or 'nothing is set'}")


def _compare_tls(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    """The switch of the NPUs' own network ports (`hccn_tool -i N -tls -g`)."""
    key = "peer.tls-switch"
    mine, other = _switches(ours), _switches(theirs)
    if not mine or not other:
        return warn(key, "the TLS switch of the NPUs' ports cannot be read on both sides", "see npu.tls-switch")
    if mine != other:
        return fail(
            key,
            f"TLS of the NPUs' ports is {_shown(mine)} here and {_shown(other)} there",
            "switch it alike on all devices of both hosts: hccn_tool -i N -tls -s enable 0 (or 1)",
        )
    return ok(key, f"{_shown(mine)} on both sides")


def _switches(facts: Mapping[str, Any]) -> set[bool]:
    return {bool(value) for value in (facts.get("tls") or {}).values() if value is not None}


def _shown(switches: set[bool]) -> str:
    return " and ".join("on" if switch else "off" for switch in sorted(switches))


def _compare_machines(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    key, name = "peer.machine", theirs.get("host", "?")
    if not ours.get("boot_id") or ours.get("boot_id") != theirs.get("boot_id"):
        return ok(key, f"{name} is another machine: KV goes over the network")
    if ours.get("network_namespace") == theirs.get("network_namespace"):
        return ok(key, f"{name} is this machine: on CPU its memory can be mapped")
    return warn(
        key,
        f"{name} is this machine in another network namespace: its memory cannot be mapped, KV goes over TCP",
        "on CPU, for speed, let both containers share the network namespace (one Pod, docker --network host)",
    )
