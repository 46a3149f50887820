# SPDX-License-Identifier: Apache-2.0
"""Every `vllm serve` under `deploy/` is accepted by the real parser and by our checks, without starting."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http import servers
from tools.containers.manifests import DEPLOY, ServeCommand, iter_serve_commands
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.serve_args import settle_serve_args

COMPOSE = {"MODEL_DIR": "/models/of/mine", "PD_SECRET_FILE": "/secrets/of/mine"}
COMMANDS = {command.where: command for command in iter_serve_commands(COMPOSE)}


@cache
def parser() -> Any:
    """The one of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def parse(command: ServeCommand, secret: Path) -> Any:
    """Parsed and settled, with a secret of ours for the one that the manifest mounts."""
    words = [re.sub(r"^(--pd-secret-file)=.*", rf"\1={secret}", word) for word in command.arguments]
    arguments = parser().parse_args(words)
    settle_serve_args(arguments, command.environment)
    return arguments


def test_every_manifest_starts_both_roles():
    folders = {where.split()[0] for where in COMMANDS}
    assert folders == {
        "compose/a2.yaml", "compose/cpu.yaml", "kubernetes/a2.yaml", "kubernetes/a3.yaml", "kubernetes/cpu.yaml",
        "llm-d/pd.yaml", "vllm-router/compose.yaml",
    }  # fmt: skip
    for folder in folders:
        roles = sorted(str(one.value("--pd-role")) for where, one in COMMANDS.items() if where.startswith(folder))
        assert roles == ["decode", "prefill"], folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", COMMANDS)
def test_the_real_parser_accepts_it(where: str, secret: Path):
    arguments = parse(COMMANDS[where], secret)
    assert (arguments.host, arguments.pd_secret_file) == ("0.0.0.0", str(secret))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("--pd-rolle=decode", SystemExit),
        ("--pd-role=both", SystemExit),
        ("--pd-lease=1ms", PDConfigError),
        ("--headless", PDConfigError),
    ],
)
def test_the_real_parser_refuses_what_is_wrong(change: str, error: type[BaseException], secret: Path):
    command = COMMANDS["kubernetes/cpu.yaml pd-prefill"]
    with pytest.raises(error):
        parse(dataclasses.replace(command, arguments=(*command.arguments, change)), secret)


@pytest.mark.parametrize("where", COMMANDS)
def test_the_health_url_is_that_of_the_port_it_listens_on(where: str):
    command = COMMANDS[where]
    if where.startswith(("compose", "vllm-router")):
        url = command.environment.get("HEALTH_URL", "http://127.0.0.1:8000/health")
        assert url == f"http://127.0.0.1:{command.value('--port')}/health"


@pytest.mark.parametrize("where", COMMANDS)
def test_the_port_is_none_that_npus_use(where: str):
    port = int(str(COMMANDS[where].value("--port")))
    assert not 20000 <= port < 36000


def test_the_router_is_started_as_where_it_is_tested():
    """Its version and flags are those of tests/e2e/http, which runs it."""
    text = Path(servers.__file__).read_text()
    flags = {flag for flag in re.findall(r"--[a-z-]+", text.partition("def start_router")[2])}
    for name in ("compose.yaml", "README.md"):
        example = (DEPLOY / "vllm-router" / name).read_text()
        assert f"pip install {'--no-cache-dir ' if name.endswith('yaml') else ''}{' '.join(servers.ROUTER)}" in example
        started = example.partition("vllm-router --")[2].partition("\n\n")[0].partition("ports:")[0]
        assert {f"--{started.split()[0]}", *re.findall(r"--[a-z-]+", started)} - {"--host"} <= flags


def test_no_secret_is_in_the_repository():
    listed = subprocess.run(
        ["git", "ls-files", "deploy"], cwd=DEPLOY.parent, capture_output=True, text=True, check=True
    )
    assert not [name for name in listed.stdout.splitlines() if not name.endswith((".yaml", ".md"))]
    assert "kind: Secret\n" not in "".join(path.read_text() for path in DEPLOY.rglob("*.yaml"))
