# SPDX-License-Identifier: Apache-2.0
"""The environment of lane `ascend-cpu`: what is made anew when, with the installer replaced."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile

import pytest

from tests.lane import LANES, find_lane
from tools.ascend_cpu import __main__ as command
from tools.ascend_cpu import env
from tools.cache import CacheError
from tools.fork.lanes import load_lanes
from tools.setup_env import ROOT

BROUGHT_BY_VLLM = {"msgspec", "prometheus_client", "setuptools", "torch", "transformers", "zmq"}


class World:
    """What the environment is made from, and what was done."""

    def __init__(self, folder):
        self.steps: list[str] = []
        self.key = "wheel-1"
        self.wheel = folder / "vllm-0-py3-none-any.whl"
        self.is_broken = False
        self.write_wheel("torch==2.11.0")

    def write_wheel(self, requires):
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("vllm-0.dist-info/METADATA", f"Name: vllm\nRequires-Dist: {requires}\n\ntext")

    def install(self, requirements, *, with_torch, torch_release, leave_out):
        assert (with_torch, torch_release) == (True, "2.11.0")
        assert requirements[0] == str(self.wheel)
        assert len(requirements) == 1 + len(env.TEST_TOOLS)
        self.steps.append("everything")
        if self.is_broken:
            raise subprocess.CalledProcessError(1, ["uv"])

    def reinstall(self, wheel):
        assert wheel == self.wheel
        self.steps.append("wheel")

    def enter(self):
        self.steps.clear()
        with env.environment() as made:
            assert made.is_ready()
        return list(self.steps)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    made = World(tmp_path)
    monkeypatch.setattr(env.setup_env, "build_libraries", lambda: None)
    monkeypatch.setattr(env.setup_env, "compute_wheel_key", lambda lane: made.key if lane == "ascend-cpu" else "")
    monkeypatch.setattr(env.setup_env, "build_wheel", lambda key, lane: made.wheel)
    monkeypatch.setattr(env, "find_installer", lambda python: made)
    monkeypatch.setattr(
        env.subprocess, "run", lambda command, check: (env.Path(command[-1])).mkdir(parents=True, exist_ok=True)
    )
    return made


def test_it_is_made_once_and_then_found(world):
    assert world.enter() == ["everything"]
    assert world.enter() == []


def test_only_the_wheel_is_put_in_anew_when_our_sources_change(world):
    world.enter()
    world.key = "wheel-2"
    assert world.enter() == ["wheel"]
    assert world.enter() == []


def test_another_environment_is_made_when_the_wheel_asks_for_something_else(world):
    world.enter()
    world.write_wheel("torch==2.11.1")
    assert world.enter() == ["everything"]


def test_what_was_not_finished_is_made_anew(world):
    world.is_broken = True
    with pytest.raises(CacheError, match="uv"):
        world.enter()
    world.is_broken = False
    assert world.enter() == ["everything"]


def test_what_is_missing_is_said_in_words_and_with_exit_status_2(world, monkeypatch, capsys):
    world.is_broken = True
    monkeypatch.setattr("sys.argv", ["ascend_cpu", "env"])
    assert command.main() == 2
    assert "`uv` failed with 1" in capsys.readouterr().err


def test_the_lanes_of_the_oracle_suite_are_those_of_the_fork():
    assert {lane.name: lane.release for lane in LANES} == {
        name: lane.release for name, lane in load_lanes().items() if name != "ascend"
    }
    assert find_lane("0.23.0+pd.1.ascend.cpu").name == "ascend-cpu"
    with pytest.raises(RuntimeError, match="0.1.0.cpu is installed"):
        find_lane("0.1.0+cpu")


def test_it_has_every_package_that_the_suite_imports():
    sources = [path for part in command.SUITE for path in (ROOT / part).rglob("*.py")]
    found = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    ours = {"tests", "tools", "vllm", "vllm_ascend_pd"}
    assert found - set(sys.stdlib_module_names) - ours - BROUGHT_BY_VLLM <= set(env.TEST_TOOLS)
