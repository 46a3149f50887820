# SPDX-License-Identifier: Apache-2.0
"""Two worker halves in two processes with their caches on the stand-in's device, staged by extract and inject there.

Between the staging buffers the host data plane moves the bytes: the stand-in's device memory is host memory. So this
shows everything of a staged transfer on an NPU but CANN's `llm_datadist`, and a real device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.engine.worker_side import Side

SRC, DST = [5, 6, 2, 19, 23], [1, 2, 20, 3, 21]


@pytest.fixture(params=["extension+kernel", "extension+memcpy"])
def backend(request, monkeypatch) -> str:
    monkeypatch.setenv("VLLM_PD_NPU_BACKEND", request.param)
    return request.param


@contextmanager
def running(folder: Path, **options: str) -> Iterator[list[Side]]:
    started: list[Side] = []
    try:
        for role, order in (("prefill", [0, 1, 2, 3]), ("decode", [2, 0, 3, 1])):
            started.append(Side(folder / role, role=role, order=order, transport="tcp", device="npu:0", **options))
        yield started
    finally:
        for side in started:
            side.end()


@pytest.fixture(params=["gqa", "sparse"])
def sides(request, backend, tmp_path):
    with running(tmp_path, kind=request.param, transfer="staged") as started:
        yield started


@pytest.mark.timeout(240)
def test_every_byte_finds_its_layer_part_and_block(sides):
    prefill, decode = sides
    result = decode.call("pull", prefill.told, SRC, DST)
    assert result["ok"], result["reason"]
    assert (result["staged"], result["calls"]) == (True, 1)
    assert decode.call("compare", SRC, DST) == []


@pytest.mark.timeout(240)
def test_a_transfer_of_all_layers_is_one_launch_on_either_side(sides, backend):
    prefill, decode = sides
    decode.call("pull", prefill.told, SRC, DST)  # prepares
    before = [side.call("read_counters") for side in sides]
    assert decode.call("pull", prefill.told, DST, SRC)["ok"]
    after = [side.call("read_counters") for side in sides]
    launches = [b["launches"] - a["launches"] for a, b in zip(before, after, strict=True)]
    assert launches == ([1, 1] if backend == "extension+kernel" else [0, 0])


@pytest.mark.timeout(240)
def test_a_link_is_measured_with_the_copies_that_the_device_makes(tmp_path):
    """Where the choice is the cost model's. Its numbers say nothing of a real device."""
    with running(tmp_path, kind="gqa", transfer="auto") as (prefill, decode):
        result = decode.call("pull", prefill.told, SRC, DST)
        assert result["ok"], result["reason"]
        (link,) = decode.call("take_links")
        assert link["transfer"]["model"]["copy_bytes_per_s"] > 0, link
        assert sum(link["transfer"]["transfers"].values()) == 1
        assert decode.call("compare", SRC, DST) == []
