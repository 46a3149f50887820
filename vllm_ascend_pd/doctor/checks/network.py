# SPDX-License-Identifier: Apache-2.0
"""Where this instance would listen: a real address of this host, a free port, and the ports that CANN takes itself."""

from __future__ import annotations

import errno
import ipaddress
import os

from vllm_ascend_pd.config import WILDCARD_HOSTS, is_loopback
from vllm_ascend_pd.datadist.ports import TAKEN_BY_CANN, allowed_ports
from vllm_ascend_pd.doctor.check import Check, fail, not_applicable, ok, warn
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.errors import PDConfigError


def check_address(host: Host, listen_host: str, flag: str = "--pd-listen") -> Check:
    """Peers are told this address and dial it."""
    key = "network.address"
    if listen_host in WILDCARD_HOSTS:
        return _check_wildcard(host, listen_host, flag)
    try:
        addresses = host.resolve(listen_host)
    except OSError as error:
        return fail(
            key,
            f"{flag} {listen_host} does not resolve ({error.strerror or error})",
            "give an address of this host, or add the name to /etc/hosts or DNS",
        )
    foreign = [address for address in addresses if not host.is_own(address)]
    if foreign:
        return fail(
            key,
            f"{flag} {listen_host} is {', '.join(foreign)}, which is no address of this host (its own: "
            f"{host.own_address()})",
            f"give {flag} {host.own_address()}, or 0.0.0.0 for all addresses",
        )
    if not any(isinstance(ipaddress.ip_address(a.partition("%")[0]), ipaddress.IPv4Address) for a in addresses):
        if is_loopback(listen_host):
            return ok(key, f"{flag} {listen_host}: this machine only (the data plane uses 127.0.0.1)")
        return fail(
            key,
            f"{flag} {listen_host} has no IPv4 address",
            "give an IPv4 address: llm_datadist links over IPv4 only",
        )
    if not is_loopback(listen_host) and any(is_loopback(address) for address in addresses):
        return fail(
            key,
            f"{flag} {listen_host} resolves to {', '.join(addresses)}: peers on other hosts would dial themselves",
            f"give {flag} {host.own_address()}, or correct the name in /etc/hosts",
        )
    only = ": this machine only" if is_loopback(listen_host) else ""
    return ok(key, f"{flag} {listen_host}{only}")


def _check_wildcard(host: Host, listen_host: str, flag: str) -> Check:
    key, own = "network.address", host.own_address()
    seen = f"{flag} {listen_host} (all addresses); peers are told {own}"
    if is_loopback(own):
        return warn(
            key,
            f"{seen}, which other hosts cannot reach: this host has no default route",
            f"set VLLM_HOST_IP, or give {flag} the address of the interface that peers use",
        )
    if not host.is_own(own):
        return fail(
            key,
            f"{seen}, which is no address of this host",
            "correct or unset VLLM_HOST_IP (with address translation, give the address that is bound here)",
        )
    if ":" in own:
        return fail(key, f"{seen}, which is IPv6", "set VLLM_HOST_IP to an IPv4 address: llm_datadist links over IPv4")
    return ok(key, seen)


def check_port(host: Host, listen_host: str, port: int, flag: str = "--pd-listen") -> Check:
    """Whether the port can be had now."""
    key = "network.port"
    if port == 0:
        first, last = host.ephemeral_ports()
        return ok(key, f"no port given: the system chooses one from {first}-{last}")
    if not 1 <= port <= 65535:
        return fail(key, f"{flag}: port {port} is not a number from 1 to 65535", "give another port")
    try:
        addresses = [listen_host] if listen_host in WILDCARD_HOSTS else host.resolve(listen_host)
    except OSError:
        return not_applicable(key, f"{listen_host} does not resolve")
    for address in addresses:
        problem = host.port_problem(address, port)
        if problem == errno.EADDRINUSE:
            holder = host.find_listener(port) or "another process"
            return fail(
                key, f"{flag}: port {port} on {listen_host} is taken by {holder}", "stop it, or give another port"
            )
        if problem == errno.EACCES:
            return fail(key, f"{flag}: port {port} needs privileges", "give a port above 1023")
        if problem and problem not in (errno.EADDRNOTAVAIL, errno.ENODEV):  # those: `check_address` says it
            return fail(key, f"{flag}: port {port} cannot be had: {os.strerror(problem)}", "give another port")
    return ok(key, f"{flag}: port {port} is free")


def check_npu_ports(host: Host, port: int, flag: str = "--pd-listen") -> Check:
    """CANN's direct transport takes random ports in 20000-35999; others there fail now and then."""
    key, num_npus = "network.npu-ports", host.count_npus()
    first, last = TAKEN_BY_CANN.start, TAKEN_BY_CANN.stop - 1
    if num_npus == 0:
        return not_applicable(key, "no NPU is visible: no port is taken by CANN")
    try:
        ours = allowed_ports(port)
    except PDConfigError as error:
        seen, _, todo = str(error).replace("--pd-listen", flag).rpartition("; ")
        return fail(key, seen, todo)
    lowest, highest = host.ephemeral_ports()
    is_reserved = any(low <= max(first, lowest) and high >= min(last, highest) for low, high in host.reserved_ports())
    if lowest <= last and highest >= first and not is_reserved:
        return warn(
            key,
            f"the system gives away ports {lowest}-{highest}, which meet CANN's {first}-{last}",
            f'in the instance\'s network namespace, as root: sysctl -w net.ipv4.ip_local_port_range="{last + 1} 60999"',
        )
    return ok(key, f"the data plane takes {ours.start}-{ours.stop - 1}, CANN random ones from {first}-{last}")
