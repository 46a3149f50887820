# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on hosts of a test network, as the guide for two servers has it. One tiny model."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from tests.builders import prompt
from tests.e2e.http.servers import Server, serve_command, serve_env
from tests.netns.network import Host, HostServer

PORT = 8100
NUM_TOKENS = 12


def write_secret(folder: Path) -> Path:
    """The file that is copied to every server."""
    path = folder / "secret"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


def start(
    name: str, host: Host, folder: Path, *arguments: str, cores: tuple[int, ...] = (0,), port: int = PORT
) -> HostServer:
    """`vllm serve --host ADDRESS …` there, one core for each of its ranks on that host; returns at once."""
    command = serve_command("--port", str(port), "--host", host.address, *arguments)
    env = serve_env(0) | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core % (os.cpu_count() or 1)) for core in cores)}
    return HostServer(name, host, command, port, folder, env)


def complete(server: Server, tokens: list[int], timeout_s: float = 90, **more: Any) -> Any:
    """The answer's JSON, or (status, JSON) of a refusal."""
    fixed = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.post("/v1/completions", {"prompt": tokens, **fixed, **more}, timeout_s)
    return answer.json if answer.status == 200 else (answer.status, answer.json)


def tokens_of(server: Server, length: int, seed: int) -> list[int]:
    """Greedy token ids for a prompt that nobody has seen."""
    ids: list[int] = complete(server, prompt(length, seed=seed))["choices"][0]["token_ids"]
    return ids
