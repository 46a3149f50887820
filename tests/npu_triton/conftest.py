# SPDX-License-Identifier: Apache-2.0
"""These tests need the environment that `python -m tools.npu_triton test` makes; elsewhere none is collected."""

from __future__ import annotations

import os

import pytest

from tools.npu_triton.env import Environment, ensure_environment

collect_ignore_glob = [] if os.environ.get("PD_TEST_NPU_TRITON") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def environment() -> Environment:
    return ensure_environment()
