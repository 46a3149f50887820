# SPDX-License-Identifier: Apache-2.0
"""The scripts of the image that can be run anywhere, with this Python in place of the image's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.containers.checks import serve_status
from tools.containers.images import ROOT

DOCKER = ROOT / "docker"


def run(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A script, with these variables and a PATH."""
    return subprocess.run(
        ["sh", str(script), *arguments],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def with_program(name: str, real: str, program: Path | str, folder: Path) -> Path:
    """A copy of the script in which a path of the image is one of this machine."""
    text = (DOCKER / name).read_text()
    assert real in text
    copy = folder / name
    copy.write_text(text.replace(real, str(program)))
    return copy


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False), (204, False)])
def test_the_health_check_wants_200(tmp_path: Path, status: int, healthy: bool):
    script = with_program("healthcheck.sh", "/opt/vllm/bin/python", sys.executable, tmp_path)
    with serve_status() as (url, answer):
        answer.append(status)
        done = run(script, HEALTH_URL=url, http_proxy="http://192.0.2.1:9")
    assert (done.returncode == 0) is healthy, done.stderr


def test_the_health_check_says_in_one_line_that_nobody_answers(tmp_path: Path):
    script = with_program("healthcheck.sh", "/opt/vllm/bin/python", sys.executable, tmp_path)
    with serve_status() as (url, _):
        pass
    done = run(script, HEALTH_URL=url)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert url in done.stderr


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """vllm.sh, starting a program that shows its arguments and environment."""
    shown = tmp_path / "shown"
    shown.write_text('#!/bin/sh\nfor one in "$@"; do echo "<$one>"; done\nenv\n')
    shown.chmod(0o755)
    return with_program("vllm.sh", "/opt/vllm/bin/vllm", shown, tmp_path)


def test_the_entry_point_passes_arguments_on_as_they_are(entry: Path):
    lines = run(entry, "serve", "a model", "--pd-prefill", "$HOME", "").stdout.splitlines()
    assert lines[:5] == ["<serve>", "<a model>", "<--pd-prefill>", "<$HOME>", "<>"]
    assert any(line.startswith("PATH=/opt/vllm/bin:") for line in lines)


def test_the_entry_point_brings_in_cann_whose_scripts_are_careless(entry: Path, tmp_path: Path):
    (tmp_path / "set_env.sh").write_text('false\nexport ASCEND_HOME_PATH="here$NOT_SET"\n[ -d /nowhere ] && true\n')
    done = run(entry, "--version", ASCEND_TOOLKIT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ASCEND_HOME_PATH=here" in done.stdout.splitlines()
    assert "ASCEND_HOME_PATH" not in run(entry, "--version", ASCEND_TOOLKIT_HOME=str(tmp_path / "no")).stdout


@pytest.mark.parametrize("wheels", [[], ["vllm-1-py3-none-any.whl", "vllm-2-py3-none-any.whl"]], ids=["none", "two"])
def test_an_installation_wants_exactly_one_wheel(tmp_path: Path, wheels: list[str]):
    for name in wheels:
        (tmp_path / name).touch()
    done = run(DOCKER / "install.sh", str(tmp_path))
    assert done.returncode == 1
    assert "wanted one vllm wheel" in done.stderr
    assert not Path("/opt/vllm").exists()


@pytest.mark.parametrize("script", ["packages.sh", "finish.sh"])
def test_an_unknown_part_is_refused_before_anything_is_done(tmp_path: Path, script: str):
    copy = tmp_path / script
    copy.write_text((DOCKER / script).read_text().replace("install -m", "true install -m"))
    done = run(copy, "a4")
    assert done.returncode == 2
    assert "'a4'" in done.stderr
