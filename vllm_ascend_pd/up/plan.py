# SPDX-License-Identifier: Apache-2.0
"""From arguments to processes: which servers, which commands, ports, cores and environment.

Pure: everything about the machine comes in as `Machine`, nothing is started, opened or looked up here.
`supervise.py` runs what this plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from vllm_ascend_pd.errors import PDConfigError

HOST: Final = "127.0.0.1"
# Small on purpose: a laptop runs a pair. Given to `vllm serve` only on CPU and only where the user said nothing.
CPU_DEFAULTS: Final = {
    "--gpu-memory-utilization": "0.1",
    "--kv-cache-memory-bytes": str(256 << 20),
}
# What `up` decides itself; the same flag among the extra arguments would contradict it.
OWN_FLAGS: Final = ("--port", "--pd-role", "--pd-prefill", "--pd-secret-file", "--pd-listen", "--pd-host-transport")
# Variables of our own that must not reach the servers from the caller's shell: `up` gives the flags instead.
DROPPED_VARIABLES: Final = (
    "VLLM_PD_CACHE",
    "VLLM_PD_ROLE",
    "VLLM_PD_PREFILL",
    "VLLM_PD_LISTEN",
    "VLLM_PD_SECRET_FILE",
    "VLLM_PD_HOST_TRANSPORT",
)


class Role(str, Enum):
    """What an instance is for. AGGREGATED is a plain server, to compare with."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclass(frozen=True)
class UpOptions:
    """What the user asked for."""

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    host_transport: str = "auto"
    serve_args: tuple[str, ...] = ()
    compare: bool = False  # one aggregated server more, with the same arguments


@dataclass(frozen=True)
class Machine:
    """What the plan needs to know about where it will run."""

    serve_command: tuple[str, ...]  # up to and without the model
    ports: tuple[int, ...]  # one per instance, in the order of the plan
    cores: tuple[int, ...]
    on_cpu: bool
    log_dir: Path
    secret_file: Path


@dataclass(frozen=True)
class Instance:
    """One server process, not started yet."""

    name: str
    role: Role
    port: int
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # on top of the caller's

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True)
class Deployment:
    """All instances, in the order in which they are started; they are stopped in the reverse."""

    model: str  # as clients call it
    instances: tuple[Instance, ...]

    def of_role(self, role: Role) -> tuple[Instance, ...]:
        """The instances of one role."""
        return tuple(instance for instance in self.instances if instance.role is role)


def list_roles(options: UpOptions) -> tuple[Role, ...]:
    """One role per instance, in the order of the plan (and of `Machine.ports`).

    Raises:
        PDConfigError: a count below one, or an extra argument that `up` decides itself.
    """
    for flag, count in (("--prefill", options.num_prefill), ("--decode", options.num_decode)):
        if count < 1:
            raise PDConfigError(f"{flag}: {count} is not a number of instances, at least 1 is needed")
    for own in OWN_FLAGS:
        if has_flag(options.serve_args, own):
            raise PDConfigError(f"{own} after `--`: `vllm pd up` chooses it for each instance; leave it out")
    roles = [Role.PREFILL] * options.num_prefill + [Role.DECODE] * options.num_decode
    return tuple(roles + [Role.AGGREGATED] * options.compare)


def plan_deployment(options: UpOptions, machine: Machine) -> Deployment:
    """The processes that make up a deployment.

    Raises:
        PDConfigError: see `list_roles`.
    """
    roles = list_roles(options)
    if len(machine.ports) != len(roles):
        raise PDConfigError(f"{len(roles)} instances need as many ports, {len(machine.ports)} were given")
    ports = dict(enumerate(machine.ports))
    urls = [f"http://{HOST}:{ports[i]}" for i, role in enumerate(roles) if role is Role.PREFILL]
    num_paired = options.num_prefill + options.num_decode
    shares = split_cores(machine.cores, num_paired)
    instances = []
    for index, role in enumerate(roles):
        number = index - roles.index(role)
        name = f"{role.value}-{number}" if role is not Role.AGGREGATED else role.value
        # The aggregated server takes the cores of the first decode instance: the same numerics, idle otherwise.
        cores = shares[index] if role is not Role.AGGREGATED else shares[options.num_prefill]
        command = [*machine.serve_command, options.model, "--port", str(ports[index])]
        command += _role_arguments(role, urls, machine.secret_file, options.host_transport)
        command += _machine_defaults(options.serve_args, machine.on_cpu)
        command += options.serve_args
        instances.append(
            Instance(
                name=name,
                role=role,
                port=ports[index],
                command=tuple(command),
                log=machine.log_dir / f"{name}.log",
                env=_environment(cores, options.serve_args, machine.on_cpu),
            )
        )
    return Deployment(get_served_name(options), tuple(instances))


def get_served_name(options: UpOptions) -> str:
    """The name that clients put into their requests."""
    return find_value(options.serve_args, "--served-model-name") or options.model


def split_cores(cores: Sequence[int], num_shares: int) -> list[tuple[int, ...]]:
    """Disjoint, contiguous shares while there are enough cores; else one core each, used by several."""
    if not cores:
        return [()] * num_shares
    if len(cores) < num_shares:
        return [(cores[i % len(cores)],) for i in range(num_shares)]
    bounds = [len(cores) * i // num_shares for i in range(num_shares + 1)]
    return [tuple(cores[bounds[i] : bounds[i + 1]]) for i in range(num_shares)]


def has_flag(arguments: Sequence[str], flag: str) -> bool:
    """Whether `flag` is given, as `--a-b V`, `--a-b=V` or with vLLM's underscores."""
    return find_value(arguments, flag) is not None


def find_value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of `flag`; an empty string for a flag at the end; None when it is not given."""
    found = None
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else "".join(arguments[index + 1 : index + 2])
    return found


def _role_arguments(role: Role, prefill_urls: Sequence[str], secret: Path, transport: str) -> list[str]:
    if role is Role.AGGREGATED:
        return ["--host", HOST]
    arguments = ["--host", HOST, "--pd-role", role.value, "--pd-secret-file", str(secret), "--pd-listen", HOST]
    arguments += ["--pd-host-transport", transport]
    return arguments + (["--pd-prefill", *prefill_urls] if role is Role.DECODE else [])


def _machine_defaults(serve_args: Sequence[str], on_cpu: bool) -> list[str]:
    if not on_cpu:
        return []
    wanted = {flag: value for flag, value in CPU_DEFAULTS.items() if not has_flag(serve_args, flag)}
    return [word for pair in wanted.items() for word in pair]


def _environment(cores: Sequence[int], serve_args: Sequence[str], on_cpu: bool) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1"}
    if on_cpu and cores:
        size = find_value(serve_args, "--tensor-parallel-size") or find_value(serve_args, "-tp") or "1"
        num_ranks = int(size) if size.isdigit() and int(size) > 0 else 1
        ranks = split_cores(cores, num_ranks)
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(str(core) for core in rank) for rank in ranks)
    return env
