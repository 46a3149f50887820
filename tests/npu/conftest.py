# SPDX-License-Identifier: Apache-2.0
"""These tests run in an environment of their own, under the stand-in: `python -m tools.npu test`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

IN_ENVIRONMENT = "PD_TEST_NPU_BUILD" in os.environ
collect_ignore_glob = [] if IN_ENVIRONMENT else ["test_*.py"]

if IN_ENVIRONMENT:
    import torch
    import torch_npu  # noqa: F401 - registers the device

    from tests.npu.standin import Standin
    from vllm_ascend_pd.npu import ops, probing


@pytest.fixture(scope="session")
def device() -> str:
    """The stand-in's first device."""
    torch.npu.set_device(0)
    return "npu:0"


@pytest.fixture
def standin(device) -> Iterator[Standin]:
    """The stand-in's counters and switches; everything is as it was afterwards."""
    controls = Standin()
    yield controls
    controls.reset()


@pytest.fixture(params=["extension+kernel", "extension+memcpy"])
def backend(request, monkeypatch) -> Iterator[str]:
    """Runs the test once with each of the extension's ways."""
    monkeypatch.setenv(probing.BACKEND_VARIABLE, request.param)
    forget()
    yield request.param
    forget()


@pytest.fixture
def defective(backend) -> Iterator[object]:
    """The build whose defects can be switched on, in the place of the one that ships; yields `set_defects`."""
    from vllm_ascend_pd.npu.extension import load_extension

    module = load_extension(probing.probe().extension)
    yield module.set_defects
    module.set_defects(0)


def pytest_collection_modifyitems(config, items) -> None:
    """One process holds one build of the extension: tests of the other one run in the other process."""
    wants = os.environ.get("PD_TEST_NPU_BUILD") == "defective"
    away = [item for item in items if ("defective" in item.fixturenames) != wants]
    if away:
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if item not in away]


def forget() -> None:
    """What was found and prepared before."""
    probing.probe.cache_clear()
    ops.forget_groups()
