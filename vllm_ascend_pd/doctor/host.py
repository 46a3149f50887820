# SPDX-License-Identifier: Apache-2.0
"""What the checks read of this host, behind one object that tests replace: files, environment, addresses, ports.

Reads only; opens a socket for a moment to see whether an address or a port can be had, and sends nothing.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_ascend_pd.config import primary_host


@dataclass(frozen=True)
class Host:
    """`root` is where proc, sys, etc and dev are."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str:
        """A file's text without white space around it; empty when it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        return (self.root / path.lstrip("/")).exists()

    def count_npus(self) -> int:
        """The driver's device files; 0 on a host without NPUs, or in a container that was given none."""
        return len(list((self.root / "dev").glob("davinci[0-9]*")))

    def ephemeral_ports(self) -> tuple[int, int]:
        """First and last port that the system gives to who asks for any."""
        words = self.read("/proc/sys/net/ipv4/ip_local_port_range").split()
        return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)

    def reserved_ports(self) -> list[tuple[int, int]]:
        """Ranges that the system does not give away by itself (`net.ipv4.ip_local_reserved_ports`)."""
        found = []
        for part in self.read("/proc/sys/net/ipv4/ip_local_reserved_ports").split(","):
            first, _, last = part.strip().partition("-")
            if first.isdigit():
                found.append((int(first), int(last) if last.isdigit() else int(first)))
        return found

    def open_files_limit(self) -> int:
        """The soft limit of this process; -1 without one."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return -1 if soft == resource.RLIM_INFINITY else soft

    def locked_memory_limit(self) -> int:
        """Bytes; -1 without a limit."""
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return -1 if soft == resource.RLIM_INFINITY else soft

    def own_address(self) -> str:
        """This host's address as others see it."""
        return primary_host()

    def resolve(self, name: str) -> list[str]:
        """All addresses of a name, or the literal itself. May ask DNS. Raises OSError."""
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(info[4][0]) for info in found))

    def is_own(self, address: str) -> bool:
        """Whether this host has that literal address (binds a UDP socket to it for a moment)."""
        return self._try_bind(address, 0, socket.SOCK_DGRAM) not in (errno.EADDRNOTAVAIL, errno.ENODEV)

    def port_problem(self, address: str, port: int) -> int:
        """The errno with which listening there fails; 0 when it would work."""
        return self._try_bind(address, port, socket.SOCK_STREAM)

    def _try_bind(self, address: str, port: int, kind: int) -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, kind) as sock:
                # As the control server does: connections of an ended one that still wait do not keep the port.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address.partition("%")[0], port))
                if kind == socket.SOCK_STREAM:
                    sock.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
        return 0

    def find_listener(self, port: int) -> str:
        """`name (pid)` of the process that listens on a TCP port; empty when it cannot be seen from here."""
        inodes = self._listening_inodes(port)
        if not inodes:
            return ""
        wanted = {f"socket:[{inode}]" for inode in inodes}
        for process in (self.root / "proc").glob("[0-9]*"):
            if any(_link_of(entry) in wanted for entry in _entries(process / "fd")):
                return f"{self.read(f'/proc/{process.name}/comm') or 'process'} (pid {process.name})"
        return ""

    def _listening_inodes(self, port: int) -> set[str]:
        found = set()
        for name in ("tcp", "tcp6"):
            for line in self.read(f"/proc/net/{name}").splitlines()[1:]:
                words = line.split()
                if len(words) > 9 and words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
        return found


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:  # another user's, or gone
        return []


def _link_of(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""
