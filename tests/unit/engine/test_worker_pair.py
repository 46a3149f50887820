# SPDX-License-Identifier: Apache-2.0
"""Two worker halves in two processes over the host data plane: every byte lands in its layer, part and block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.unit.engine.worker_side import LAYERS, NUM_BLOCKS, Side, make_config
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.datadist import choose
from vllm_ascend_pd.engine.worker import WorkerHalf
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.handshake import compare
from vllm_ascend_pd.secret import Secret

SRC, DST = [5, 6, 2, 19, 23], [1, 2, 20, 3, 21]


@contextmanager
def running(tmp_path, **options) -> Iterator[tuple[Side, Side]]:
    """P has allocated its layers in order, D in another one."""
    sides = []
    try:
        for role, order in (("prefill", [0, 1, 2, 3]), ("decode", [2, 0, 3, 1])):
            sides.append(Side(tmp_path / role, role=role, order=order, **options))
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.end()


@pytest.fixture(scope="module")
def mla(tmp_path_factory) -> Iterator[tuple[Side, Side]]:
    with running(tmp_path_factory.mktemp("mla"), kind="mla", transfer="straight") as sides:
        yield sides


@pytest.mark.parametrize(("kind", "transfer"), [("gqa", "straight"), ("gqa", "staged"), ("sparse", "staged")])
def test_layers_that_were_allocated_in_another_order_are_paired_by_name(tmp_path, kind, transfer):
    with running(tmp_path, kind=kind, transfer=transfer, transport="tcp") as (prefill, decode):
        assert prefill.told["record"] == decode.told["record"]
        result = decode.call("pull", prefill.told, SRC, DST)
        assert result["ok"], result["reason"]
        assert (result["staged"], result["calls"]) == (transfer == "staged", 1), "one call for all layers of one shape"
        assert decode.call("compare", SRC, DST) == []


def test_a_rank_that_has_ordered_its_caches_otherwise_is_not_read(mla):
    prefill, decode = mla
    decode.call("fill")
    address = {**prefill.told["address"], "caches": "another order"}
    result = decode.call("pull", {**prefill.told, "address": address}, SRC, DST)
    assert not result["ok"]
    assert result["reason"].startswith("layout: caches another order there")
    assert decode.call("compare", [], []) == []


def test_the_parts_of_mla_are_two_caches_and_every_byte_finds_its_place(mla):
    prefill, decode = mla
    result = decode.call("pull", prefill.told, SRC, DST)
    assert (result["ok"], result["calls"]) == (True, 2), result["reason"]
    assert decode.call("compare", SRC, DST) == []


@pytest.mark.parametrize(("src", "dst"), [([0, 5], [1, 2]), ([5, 6], [1, 0]), ([], [])])
def test_the_null_block_and_nothing_are_never_pulled(mla, src, dst):
    prefill, decode = mla
    decode.call("fill")
    result = decode.call("pull", prefill.told, src, dst)
    assert (result["ok"], result["calls"]) == (False, 0)
    assert "null block" in result["reason"] or "0 blocks to read" in result["reason"]
    assert decode.call("compare", [], []) == []


def test_the_handshake_names_the_layer_and_both_values(mla):
    (group,) = mla[0].told["record"]
    other = {**group, "layers": {**group["layers"], LAYERS[1]: [[0, 2, 9, "int8"]]}}
    found = compare({"layout": {"caches": [[group]]}}, {"layout": {"caches": [[other]]}})
    first = next(difference for difference in found if difference.field.startswith("layout"))
    assert first.field == f"layout.caches[0][0].layers.{LAYERS[1]}.length"
    assert (first.ours, first.theirs) == ("2", "1")


@pytest.mark.parametrize(("is_installed", "missing"), [(False, "the package llm_datadist"), (True, "a device file")])
def test_caches_on_a_device_are_refused_where_cann_is_not(
    tmp_path: Path, monkeypatch, is_installed: bool, missing: str
):
    """The host plane would read the process's memory at a device's addresses."""
    monkeypatch.setattr(choose, "is_installed", lambda: is_installed)
    monkeypatch.setattr(choose, "_DEVICE_FILES", str(tmp_path / "davinci*"))
    config = PDConfig(role=PDRole.PREFILL, engine_id="p", epoch="e", runtime_dir=str(tmp_path))
    half = WorkerHalf(config, Secret(b"s" * 32), make_config("gqa"), 0, 1)
    caches = {name: (torch.empty(NUM_BLOCKS, 16, 4, 32, dtype=torch.bfloat16, device="meta"),) * 2 for name in LAYERS}
    with pytest.raises(PDConfigError, match=f"KV caches are on meta, and {missing}.*vllm pd doctor"):
        half.register(caches)
