# SPDX-License-Identifier: Apache-2.0
"""Containers: id mapping, whether peers' memory can be mapped from here, and why clocks are not looked at."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from vllm_ascend_pd.datadist.host.descriptors import receive_arenas, send_arenas
from vllm_ascend_pd.datadist.host.framing import ChannelError
from vllm_ascend_pd.doctor.check import Check, not_applicable, ok, warn
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.memory.arena import Arena

PROBE_TIMEOUT_S = 2.0
_WHOLE = 2**32 - 1


def find_container(host: Host) -> str:
    """What kind of container this is; empty outside of one."""
    if host.exists("/.dockerenv"):
        return "Docker"
    if host.exists("/run/.containerenv"):
        return "Podman"
    if host.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    return host.environ.get("container", "")


def check_id_mapping(host: Host) -> Check:
    """A user namespace with other ids changes who owns the secret file; mapping memory works across it."""
    key, kind = "container.ids", find_container(host) or "no container"
    ranges = [tuple(map(int, line.split())) for line in host.read("/proc/self/uid_map").splitlines()]
    if not ranges or (len(ranges) == 1 and ranges[0][:2] == (0, 0) and ranges[0][2] >= _WHOLE):
        return ok(key, f"{kind}, user ids are the host's (uid {os.geteuid()})")
    inside, outside, count = ranges[0]
    return ok(
        key,
        f"{kind}, user namespace: uid {inside} here is uid {outside} outside ({count} ids). The secret file must "
        f"belong to uid {os.geteuid()} as seen from here; mapped memory is passed by descriptor and does not mind",
    )


def probe_mapping() -> None:
    """Pass a small arena to ourselves as a peer would get it. Raises OSError, ChannelError, MemoryError."""
    arena = Arena.create(2 << 20, "doctor")
    arena.buffer[0] = 7
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(f"\0vllm-pd-doctor-{os.getpid()}-{time.monotonic_ns()}")  # the kind that a link uses
        server.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
            sender.connect(server.getsockname())
            receiver, _ = server.accept()
            with receiver:
                deadline = time.monotonic() + PROBE_TIMEOUT_S
                send_arenas(sender, {1: arena}, deadline)
                for mapping in receive_arenas(receiver, deadline).values():
                    mapping.close()


def check_mapping(host: Host, probe: Callable[[], None] = probe_mapping) -> Check:
    """Whether an instance here can map the memory of one on the same machine."""
    key = "container.mapping"
    if host.count_npus():
        return not_applicable(key, "KV lies in NPU memory: host memory is not mapped")
    try:
        probe()
    except (OSError, ChannelError, MemoryError) as error:
        return warn(
            key,
            f"memory cannot be passed over a Unix socket here ({error}): peers on this machine are read over TCP",
            "allow memfd_create, abstract Unix sockets and descriptor passing (seccomp or AppArmor profile)",
        )
    if find_container(host):
        return ok(
            key,
            "works inside this container; another container is mapped only in the same network namespace (one Pod, "
            "docker --network container:NAME or host), else read over TCP",
        )
    return ok(key, "peers on this machine can be mapped")


def check_clocks() -> Check:
    """Nothing compares wall clocks; operators ask."""
    return ok("container.clocks", "not compared: leases and deadlines use each host's own monotonic clock")
