# SPDX-License-Identifier: Apache-2.0
"""What is sent to an image build: all that the wheel is made from, and nothing else."""

from __future__ import annotations

import pytest

from tools.containers.context import is_sent, list_context, read_ignore
from tools.containers.images import ROOT
from tools.setup_env import WHEEL_SOURCES

PATTERNS = read_ignore((ROOT / ".dockerignore").read_text())


def test_everything_that_the_wheel_is_made_from_is_sent():
    sent = set(list_context(ROOT))
    for source in WHEEL_SOURCES:
        if (ROOT / source).exists():
            wanted = [name for name in sent if name == source or name.startswith(f"{source}/")]
            assert wanted, f"{source} is not in the build context"


def test_every_script_of_the_dockerfile_is_sent():
    assert {f"docker/{path.name}" for path in (ROOT / "docker").iterdir()} <= set(list_context(ROOT))


@pytest.mark.parametrize(
    "name",
    [
        ".git/config", ".venv/bin/python", "tests/models.py", "docs/a.md", "dist/vllm-1.whl", "deploy/compose/cpu.yaml",
        "vllm_ascend_pd/native/libpd_host.so", "vllm_ascend_pd/__pycache__/config.cpython-311.pyc", "pd-secret",
        "tools/containers/pair.py",
    ],
)  # fmt: skip
def test_it_is_not_sent(name: str):
    assert not is_sent(name, PATTERNS)


@pytest.mark.parametrize(
    "name", ["vllm_ascend_pd/native/library.py", "tools/containers/requirements.py", "docker/vllm.sh", "pyproject.toml"]
)
def test_it_is_sent(name: str):
    assert is_sent(name, PATTERNS)


def test_the_last_matching_pattern_decides():
    assert [is_sent("a/b", patterns) for patterns in (["**"], ["**", "!a"], ["**", "!a", "a/b"], ["!a"])] == [
        False, True, False, True,
    ]  # fmt: skip
