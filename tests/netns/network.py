# SPDX-License-Identifier: Apache-2.0
"""Several servers on one machine: network namespaces on one bridge, each with one address. Needs root and `ip`.

They share disk, CPU and process table, but not the network: an address of one is no address of another, so KV moves by
TCP, and pulling a cable is `ip link set … down`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.http.servers import Server


def why_not() -> str:
    """The reason why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs the program ip (Debian: iproute2)"
    name = f"pdtry{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str
    cable: str  # its end at the switch

    def command(self, words: Sequence[str]) -> list[str]:
        """The same, run there."""
        return ["ip", "netns", "exec", self.name, *words]

    def environment(self) -> dict[str, str]:
        """What torch and vLLM need to choose the interface that others see."""
        return {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": self.address}

    def unplug(self) -> None:
        """Nothing comes in or goes out, and nobody is told."""
        _ip("link", "set", self.cable, "down")

    def plug_in(self) -> None:
        """As before."""
        _ip("link", "set", self.cable, "up")


class Network:
    """`num_hosts` hosts, and this machine on the same switch. A context manager: leaves nothing behind."""

    def __init__(self, num_hosts: int) -> None:
        mark = secrets.token_hex(3)
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self._switch = f"pds{mark}"
        self._own = f"{net}.254/24"
        self.hosts = [Host(f"pdh{mark}{i}", f"{net}.{i + 1}", f"pdv{mark}{i}") for i in range(num_hosts)]

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._switch, "type", "bridge")
            _ip("addr", "add", self._own, "dev", self._switch)
            _ip("link", "set", self._switch, "up")
            for host in self.hosts:
                _ip("netns", "add", host.name)
                _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
                _ip("link", "set", host.cable, "master", self._switch, "up")
                for device in ("lo", "eth0"):
                    _ip("-n", host.name, "link", "set", device, "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it all away."""
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._switch], check=False, capture_output=True)


class HostServer(Server):
    """An HTTP server that runs on a host of the network."""

    def __init__(self, name: str, host: Host, command: Sequence[str], port: int, folder: Path, env: dict[str, str]):
        super().__init__(name, host.command(command), port, folder, {**env, **host.environment()})
        self.url = f"http://{host.address}:{port}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
