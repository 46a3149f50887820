# SPDX-License-Identifier: Apache-2.0
"""The image of vllm-router, whose Dockerfile is written inside its compose file: linted, pinned, not root."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containers.test_dockerfile import lint
from tests.e2e.http import servers
from tools.containers import dockerfile
from tools.containers.checks import serve_status
from tools.containers.manifests import DEPLOY, read_compose

NEEDED = {"MODEL_DIR": "/models/of/mine", "PD_SECRET_FILE": "/secrets/of/mine"}


def router() -> dict[str, Any]:
    """The service, as compose reads it."""
    service: dict[str, Any] = read_compose(DEPLOY / "vllm-router/compose.yaml", NEEDED)["services"]["router"]
    return service


def text() -> str:
    """Its Dockerfile."""
    return str(router()["build"]["dockerfile_inline"])


def stage() -> dockerfile.Stage:
    """The only one of its Dockerfile."""
    (found,) = dockerfile.parse(text()).values()
    return found


def test_hadolint_has_nothing_to_say(tmp_path: Path):
    (tmp_path / "Dockerfile").write_text(text())
    assert lint("hadolint", tmp_path / "Dockerfile") == ""


def test_everything_is_installed_at_a_version_and_before_the_start():
    (run,) = stage().find("RUN")
    packages = run.text.partition("&&")[0].split()[2:]
    assert [one for one in packages if not one.startswith("--") and not re.fullmatch(r"[\w-]+==[\d.]+", one)] == []
    assert set(servers.ROUTER) <= {*packages, *(one.partition("==")[0] for one in packages)}
    assert router()["command"].split()[0] == "vllm-router", "nothing is installed at the start"


def test_a_process_of_the_router_is_not_root_and_gets_no_capability():
    (user,) = stage().find("USER")
    uid, _, gid = user.text.partition(":")
    assert min(int(uid), int(gid)) > 0
    assert f"--uid {uid} " in stage().find("RUN")[0].text
    service = router()
    assert "user" not in service
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])


def test_its_health_check_asks_the_port_that_it_listens_on():
    words = router()["command"].split()
    port = words[words.index("--port") + 1]
    (health,) = stage().find("HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/health'" in health.text
    assert [one.text for one in stage().find("EXPOSE")] == [port]
    assert router()["ports"] == [f"127.0.0.1:8000:{port}"]


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
def test_the_health_check_wants_200_and_asks_no_proxy(status: int, healthy: bool):
    (health,) = stage().find("HEALTHCHECK")
    _, flag, code = dockerfile.Instruction(0, "CMD", health.text.removeprefix("CMD ")).words
    with serve_status() as (url, answer):
        answer.append(status)
        code = code.replace("http://127.0.0.1:8000/health", url)
        assert url in code
        env = {"http_proxy": "http://192.0.2.1:9"}
        done = subprocess.run([sys.executable, flag, code], env=env, capture_output=True, timeout=30, check=False)
    assert (done.returncode == 0) is healthy, done.stderr
