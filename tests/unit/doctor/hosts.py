# SPDX-License-Identifier: Apache-2.0
"""Hosts as the checks see them, made of files in a folder and of what a test says about addresses and ports."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path

from vllm_ascend_pd.doctor.host import Host

OWN = "192.0.2.7"


@dataclass(frozen=True)
class FakeHost(Host):
    own: str = OWN
    names: dict[str, list[str]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # port -> errno
    open_files: int = 65536
    locked: int = -1

    def own_address(self) -> str:
        return self.own

    def resolve(self, name: str) -> list[str]:
        if name in self.names:
            return self.names[name]
        if not name[0].isdigit() and ":" not in name:
            raise OSError(errno.ENOENT, "Name or service not known")
        return [name]

    def is_own(self, address: str) -> bool:
        return address in (OWN, "127.0.0.1", "127.0.1.1", "::1", "2001:db8::7")

    def port_problem(self, address: str, port: int) -> int:
        return self.taken.get(port, 0)

    def open_files_limit(self) -> int:
        return self.open_files

    def locked_memory_limit(self) -> int:
        return self.locked

    def find_listener(self, port: int) -> str:
        return "python (pid 4711)"


def make_host(
    root: Path, files: dict[str, str] | None = None, *, num_npus: int = 0, environ: dict[str, str] | None = None, **more
) -> FakeHost:
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for number in range(num_npus):
        (root / f"dev/davinci{number}").touch()
    return FakeHost(root=root, environ=environ or {}, **more)
