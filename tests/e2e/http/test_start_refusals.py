# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` that must not start: exit code, and a message that names what to change."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.http.conftest import Deployment
from tests.e2e.http.servers import Server, free_port, start_server

pytestmark = [pytest.mark.http, pytest.mark.timeout(30)]
END_WITHIN_S = 240.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments, and words that the output has to contain."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    model: str = "gqa2"
    env: tuple[tuple[str, str], ...] = ()


def cases(deployment: Deployment, folder: Path) -> dict[str, Case]:
    """By name. The first ones end while arguments are read, the last two after their engine has started."""
    secret = ("--pd-secret-file", str(deployment.secret_file))
    empty, shared = folder / "empty", folder / "shared"
    empty.touch(0o600)
    shared.touch()
    shared.write_text("x" * 40)
    shared.chmod(0o644)
    silent = f"http://127.0.0.1:{free_port()}"
    prefill = deployment.prefill[0].url
    decode = ("--pd-role", "decode")
    return {
        "prefill urls without a role": Case(("--pd-prefill", prefill), ("--pd-prefill", "--pd-role decode")),
        "missing secret": Case(("--pd-role", "prefill", "--pd-secret-file", str(folder / "no")), ("--pd-secret-file",)),
        "empty secret": Case(("--pd-role", "prefill", "--pd-secret-file", str(empty)), ("is empty",)),
        "world-readable secret": Case(("--pd-role", "prefill", "--pd-secret-file", str(shared)), ("chmod 600",)),
        "public address without a secret": Case(
            ("--pd-role", "prefill", "--host", "0.0.0.0"), ("--host", "--pd-secret-file")
        ),
        "rust front end": Case(decode, ("VLLM_USE_RUST_FRONTEND",), env=(("VLLM_USE_RUST_FRONTEND", "1"),)),
        "no prefill server answers": Case(
            (*decode, *secret, "--pd-prefill", silent, "--pd-start-timeout", "2s"), (silent, "--pd-start-timeout")
        ),
        "another model": Case((*decode, *secret, "--pd-prefill", prefill), ("model_config.", prefill), model="gqa4"),
    }


NAMES = (
    "prefill urls without a role", "missing secret", "empty secret", "world-readable secret",
    "public address without a secret", "rust front end", "no prefill server answers", "another model",
)  # fmt: skip


@pytest.fixture(scope="module")
def ended(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Case, Server]]]:
    """All of them, started a few at a time and ended."""
    folder = tmp_path_factory.mktemp("refusals")
    waiting = cases(deployment, folder)
    assert set(waiting) == set(NAMES)
    started: dict[str, tuple[Case, Server]] = {}
    deadline = time.monotonic() + END_WITHIN_S
    try:
        for name, case in waiting.items():
            while sum(server.poll() is None for _, server in started.values()) >= 3:
                time.sleep(0.2)
            server = start_server(
                name.replace(" ", "-"), folder, len(started), *case.arguments, model=case.model, env=dict(case.env)
            )
            started[name] = (case, server)
        while any(server.poll() is None for _, server in started.values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield started
    finally:
        for _, server in started.values():
            server.kill()


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_must_not_start_ends_and_says_why(ended: dict[str, tuple[Case, Server]], name: str):
    case, server = ended[name]
    code = server.poll()
    log = server.log.read_text(errors="replace")
    assert code is not None, f"still runs:\n{log[-3000:]}"
    assert code > 0
    for word in case.words:
        assert word in log, log[-3000:]


def test_the_prefill_server_that_refused_another_model_still_serves(
    deployment: Deployment, ended: dict[str, tuple[Case, Server]]
):
    assert ended["another model"]
    assert deployment.prefill[0].get("/health").status == 200
