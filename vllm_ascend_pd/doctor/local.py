# SPDX-License-Identifier: Apache-2.0
"""All checks of this host, in the order in which they are told, and the cheap ones that `vllm serve --pd-role` runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.ascend.host_facts import collect_facts
from vllm_ascend_pd.ascend.pairing import PairingFacts, check_pairing
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.doctor.check import Check, State, fail, refuse_failed
from vllm_ascend_pd.doctor.checks import container, memory, network, npu, secret_file, software
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.doctor.peer import facts as host_facts
from vllm_ascend_pd.memory.available import AvailableMemory, read_available_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What the operator means to use; `listen` is of --pd-listen (or --listen), None when not given."""

    listen: tuple[str, int] | None = None
    listen_flag: str = "--pd-listen"
    secret_file: str | None = None
    must_bind: bool = True  # False: the port is held by ourselves


class LocalFacts:
    """What is read once and used by several checks."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.pairing: PairingFacts = collect_facts(root=host.root, environ=host.environ)
        self.npus = npu.read_npus(host)

    def for_peer(self) -> dict[str, Any]:
        """What a doctor tells another."""
        return host_facts.collect(self.host, self.pairing, self.npus.tls_by_device if self.npus else {})


def check_host(facts: LocalFacts, wanted: Wanted) -> Iterator[Check]:
    """Everything that one host can tell."""
    host = facts.host
    yield from software.check_versions(check_pairing(facts.pairing), facts.pairing.distribution)
    yield software.check_library()
    yield software.check_data_plane(host)
    yield from npu.check_npus(host, facts.npus)
    yield memory.check_arena_room(_available(host))
    yield memory.check_huge_pages(host)
    yield memory.check_open_files(host)
    yield memory.check_locked_memory(host)
    yield from _check_listening(host, wanted)
    yield secret_file.check_secret(wanted.secret_file, wanted.listen[0] if wanted.listen else None)
    yield container.check_id_mapping(host)
    yield container.check_mapping(host)
    yield container.check_clocks()


def _available(host: Host) -> AvailableMemory:
    try:
        return read_available_memory(host.root)
    except OSError:
        return AvailableMemory(0)


def _check_listening(host: Host, wanted: Wanted) -> Iterator[Check]:
    address, port = wanted.listen or ("0.0.0.0", 0)
    yield network.check_address(host, address, wanted.listen_flag)
    if wanted.must_bind:
        yield network.check_port(host, address, port, wanted.listen_flag)
    yield network.check_npu_ports(host, port, wanted.listen_flag)


# ---------------------------------------------------------------- at the start of `vllm serve --pd-role`


def check_start(config: PDConfig, flag: str, *, binds: bool = True, host: Host | None = None) -> list[Check]:
    """The cheap part: no network, no tools of the driver, some milliseconds. The versions are judged by their owner.

    `flag` is the one that names the address; `binds` is False where another node of the instance has the port.
    """
    host = host or Host()
    is_prefill = config.role is PDRole.PREFILL
    checks = [software.check_library()]
    if checks[0].state is State.FAIL:
        return checks  # the others need it
    checks.append(software.check_data_plane(host))
    checks.append(network.check_address(host, config.listen_host, flag))
    if is_prefill and binds:  # a decode instance listens for nobody
        checks.append(network.check_port(host, config.listen_host, config.listen_port, flag))
        checks.append(network.check_npu_ports(host, config.listen_port, flag))
    if host.count_npus():
        checks.append(npu.check_environment(host))
        checks.append(_check_hccn(host))
    else:
        checks.append(memory.check_huge_pages(host))
    checks.append(memory.check_open_files(host))
    return checks


def _check_hccn(host: Host) -> Check:
    from vllm_ascend_pd.ascend import devices

    try:
        return npu.check_hccn_conf(devices.hccn_conf(devices.System(root=host.root, environ=host.environ)))
    except devices.DeviceError as error:
        return fail("npu.hccn-conf", str(error), "let this user read it")


def refuse_bad_start(config: PDConfig, flag: str, *, binds: bool = True) -> None:
    """Log what is worth a warning; stop a start that cannot work. Called once, in the command's main process.

    Raises:
        PDConfigError: in the words of `vllm pd doctor`.
    """
    checks = check_start(config, flag, binds=binds)
    for check in checks:
        if check.state is State.WARN:
            logger.warning("pd: %s (vllm pd doctor says more)", check)
    refuse_failed(checks)
