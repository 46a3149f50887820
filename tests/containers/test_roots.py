# SPDX-License-Identifier: Apache-2.0
"""Ending a container: whatever user it has become, nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tools.containers import roots


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and another user need root")
@pytest.mark.parametrize("user", ["1000:0", "0:0"])
def test_a_container_ends_whole_whoever_it_has_become(user: str):
    inside = ["chroot", f"--userspec={user}", "/", "sh", "-c", "sleep 300 & wait"]
    process = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", *inside])
    found: set[int] = set()
    until = time.monotonic() + 10
    while len(found) < 2 and time.monotonic() < until:  # the shell and its sleep
        time.sleep(0.05)
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = {int(pid) for pid in first}
        for pid in first:
            found |= {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    assert len(found) == 2
    roots.end(process)
    until = time.monotonic() + 5
    while any(map(is_alive, found)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in found if is_alive(pid)]
