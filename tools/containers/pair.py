# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode container on two hosts of a network of our own: does a request's KV move between them?

The hosts are network namespaces joined by one cable (veth), so nothing else can reach them. Each container has its
own mount, PID and IPC namespaces, runs as the image's user, and reads the secret from a file of that user with mode
0400, as in `deploy/`. Tokens are compared with an aggregated server elsewhere (`tests/e2e`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.cache import staging
from tools.containers import roots
from tools.containers.checks import CheckFailed, Container, find_first_process
from tools.containers.images import Image
from tools.containers.roots import Bind

ADDRESSES: Final = {"prefill": "10.213.7.1", "decode": "10.213.7.2"}
START_S: Final = 900.0
STOP_S: Final = 90.0
PROMPT: Final = [7 + number % 90 for number in range(100)]
_ASK: Final = """
import sys, urllib.request
data = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request(sys.argv[1], data, {"content-type": "application/json"})
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120).read().decode())
"""


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    role: str
    namespace: str

    def ask(self, path: str, body: Any = None) -> str:
        """The answer of the server on this host.

        Raises:
            CheckFailed: it does not answer, or not with 200.
        """
        url = f"http://127.0.0.1:8000{path}"
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", _ASK, url]
        done = subprocess.run(
            [*command, *([json.dumps(body)] if body is not None else [])], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CheckFailed(f"{self.role} {path}: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout


@contextmanager
def two_hosts() -> Iterator[dict[str, Host]]:
    """Two network namespaces and the cable; both gone afterwards."""
    hosts = {role: Host(role, f"pd-{role}-{os.getpid()}") for role in ADDRESSES}
    prefill, decode = hosts["prefill"].namespace, hosts["decode"].namespace
    try:
        for host in hosts.values():
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
        ip("-n", prefill, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", decode)
        for role, host in hosts.items():
            ip("-n", host.namespace, "address", "add", f"{ADDRESSES[role]}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
            ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")
        yield hosts
    finally:
        for host in hosts.values():
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False)


def ip(*words: str) -> None:
    """iproute2."""
    subprocess.run(["ip", *words], check=True)


def check_pair(image: Image, model: Path) -> str:
    """Serve, ask, stop.

    Raises:
        CheckFailed: says what did not happen, with the end of the logs.
    """
    with staging(roots.get_store() / "running") as scratch, two_hosts() as hosts, ExitStack() as stack:
        uid, _, gid = image.user.partition(":")
        secret, names = scratch / "secret", scratch / "hosts"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o400)
        os.chown(secret, int(uid), int(gid))
        # An engine puts the container's own name there too; without it gloo asks a DNS server that is not there.
        local = f"127.0.0.1 localhost {socket.gethostname()}"
        names.write_text(f"{local}\n{ADDRESSES['prefill']} prefill\n{ADDRESSES['decode']} decode\n")
        weights = shutil.copytree(model, scratch / "model")  # a model's files may be its owner's only
        for path in (weights, *weights.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        binds = [Bind(secret, "/run/secrets/pd-secret"), Bind(names, "/etc/hosts"), Bind(weights, "/models/model")]
        servers = {
            role: stack.enter_context(started(image, host, binds, scratch / role)) for role, host in hosts.items()
        }
        try:
            for role, host in hosts.items():
                wait_healthy(host, servers[role])
            decode = hosts["decode"]
            pulled, seen = ask(decode, loads=True)
            stopped = stop(servers["prefill"])
            computed, _ = ask(decode, loads=False)
            if pulled != computed:
                raise CheckFailed(f"with KV from prefill {pulled}, computed by decode itself {computed}")
            return f"{seen}; {stopped}; decode alone: the same {len(computed)} tokens"
        except CheckFailed as error:
            logs = "\n".join((scratch / role / "log").read_text(errors="replace")[-3000:] for role in hosts)
            raise CheckFailed(f"{error}\n{logs}") from None


@contextmanager
def started(image: Image, host: Host, binds: Sequence[Bind], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `vllm serve` container on a host."""
    folder.mkdir()
    command = [
        *image.entrypoint,
        *("serve", "/models/model", "--served-model-name=model", "--host=0.0.0.0", "--port=8000"),
        *("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--kv-cache-memory-bytes=33554432"),
        *("--gpu-memory-utilization=0.1", "--max-num-seqs=4", "--block-size=32"),
        *(f"--pd-role={host.role}", "--pd-secret-file=/run/secrets/pd-secret", "--shutdown-timeout=60"),
        *(("--pd-prefill", "dns+http://prefill:8000") if host.role == "decode" else ()),
    ]
    run = Container(image).run(command, binds=binds, env={"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"})
    run = roots.Run(**{**run.__dict__, "network": host.namespace})
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(run.argv(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        roots.end(process)


def wait_healthy(host: Host, process: subprocess.Popen[bytes]) -> None:
    """Until /health says 200."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            host.ask("/health")
            return
        except CheckFailed as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"{host.role} did not start (exit code {process.poll()}): {error}") from None
        time.sleep(1.0)


def ask(decode: Host, *, loads: bool) -> tuple[list[int], str]:
    """A completion's token ids, and where its KV came from: the other host, or (not `loads`) this one.

    Each kind has a salt of its own, so that the second is not answered from what the first has left in the cache.
    """
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = json.loads(decode.ask("/pd/status"))["totals"]["tokens"]
    answer = json.loads(
        decode.ask("/v1/completions", {**body, "cache_salt": f"loads={loads}", "return_token_ids": True})
    )
    status = json.loads(decode.ask("/pd/status"))
    tokens, transports = status["totals"]["tokens"] - before, sorted({link["transport"] for link in status["links"]})
    if answer["usage"]["completion_tokens"] != 8 or tokens != (len(PROMPT) - 1 if loads else 0):
        raise CheckFailed(f"{answer['usage']}, {tokens} tokens of KV came from prefill")
    return answer["choices"][0]["token_ids"], f"{tokens} tokens of KV over {' and '.join(transports)}"


def stop(process: subprocess.Popen[bytes]) -> str:
    """SIGTERM to process 1, as `docker stop` does."""
    started_at = time.monotonic()
    find_first_process(process.pid).send(signal.SIGTERM)
    try:
        code = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"prefill is still there {STOP_S:g} s after SIGTERM") from None
    return f"prefill ended {time.monotonic() - started_at:.1f} s after SIGTERM with {code}"
