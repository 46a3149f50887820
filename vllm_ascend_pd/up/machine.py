# SPDX-License-Identifier: Apache-2.0
"""The facts that a plan needs: free ports, cores, where to log, a fresh secret, whether this vLLM is the CPU build.

The only module of `up` that asks the operating system before anything is started.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.up.plan import HOST, Machine, UpOptions, list_roles


def get_serve_command() -> tuple[str, ...]:
    """`vllm serve` of this environment: its script, since `python -m` would import from the current folder first."""
    script = Path(sys.executable).with_name("vllm")
    return (str(script), "serve") if script.exists() else (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


@contextlib.contextmanager
def prepare_machine(
    options: UpOptions,
    *,
    port_base: int | None = None,
    log_dir: Path | None = None,
    serve_command: Sequence[str] | None = None,
) -> Iterator[Machine]:
    """A `Machine` for these options; its secret file exists (0600) until the block is left.

    Raises:
        PDConfigError: wrong counts, a model that is not there, or a wanted port is taken.
    """
    num_instances = len(list_roles(options))
    check_model(options.model)
    ports = find_free_ports(num_instances) if port_base is None else check_ports(port_base, num_instances)
    private = Path(tempfile.mkdtemp(prefix="vllm-pd-up-"))  # 0700
    try:
        secret = private / "secret"
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        yield Machine(
            serve_command=tuple(serve_command or get_serve_command()),
            ports=tuple(ports),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            on_cpu=is_cpu_build(),
            log_dir=log_dir if log_dir is not None else get_default_log_dir(),
            secret_file=secret,
        )
    finally:
        shutil.rmtree(private, ignore_errors=True)


def check_model(model: str) -> None:
    """Find out now, and not after a minute of imports in every server, that a folder is not there.

    Raises:
        PDConfigError: `model` is written as a path and names nothing.
    """
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise PDConfigError(f"MODEL: {model} does not exist")


def is_cpu_build() -> bool:
    """What vLLM's own platform detection asks: is there "cpu" in the version of the distribution?"""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False


def get_default_log_dir() -> Path:
    """A new folder per run under the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local/state"
    return base / "vllm-pd/logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def find_free_ports(count: int) -> list[int]:
    """Ports from the operating system, all different (each is held until all are known)."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind((HOST, 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def check_ports(base: int, count: int) -> list[int]:
    """`base`, `base + 1`, … if all can be bound now.

    Raises:
        PDConfigError: one is out of range or taken.
    """
    ports = list(range(base, base + count))
    for port in ports:
        if not 1 <= port <= 65535:
            raise PDConfigError(f"--port-base {base}: {count} instances would need port {port}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise PDConfigError(
                    f"--port-base {base}: port {port} cannot be used ({error.strerror}); "
                    f"free it, choose another base, or leave the flag out to get free ports"
                ) from error
    return ports
