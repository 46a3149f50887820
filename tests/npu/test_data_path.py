# SPDX-License-Identifier: Apache-2.0
"""Extract and inject through torch_npu's queue over the stand-in: right bytes, one launch or merged copies, no sync."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.npu.caches import IDS, SHAPES, are_same, clone, make_layers, take_blocks, to_device
from tests.npu.standin import poll
from vllm_ascend_pd.npu import ops, probing
from vllm_ascend_pd.npu.slices import BlockShape, retile_heads, slice_heads

GQA_BLOCK = BlockShape(num_tokens=16, num_heads=4, head_bytes=64)


def make_staging(layers, ids, device, slices=None):
    return torch.empty(ops.compute_staging_bytes(layers, len(ids), slices), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_extract_gathers_the_blocks_of_every_tensor(device, standin, backend, kind, ids):
    host = make_layers(kind)
    layers = to_device(host, device)
    staging = make_staging(layers, ids, device)
    ops.extract(layers, ids, staging).synchronize()
    assert torch.equal(staging.cpu(), take_blocks(host, ids))
    assert are_same(layers, host)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_inject_writes_these_blocks_and_no_others(device, standin, backend, kind, ids):
    source, host = make_layers(kind, seed=1), make_layers(kind, seed=2)
    layers = to_device(host, device)
    ops.inject(layers, ids, take_blocks(source, ids).to(device)).synchronize()
    expected = clone(host)
    for layer, taken in zip(expected, source, strict=True):
        for tensor, other in zip(layer, taken, strict=True):
            tensor[ids] = other[ids]
    assert are_same(layers, expected)


@pytest.mark.parametrize("num_splits", [2, 4])
@pytest.mark.parametrize("refuse_2d", [False, True])
def test_inject_retiles_heads_in_the_same_launch(device, standin, backend, num_splits, refuse_2d):
    standin.refuse_2d(refuse_2d)
    ids, host = [11, 3, 4], make_layers("gqa", seed=3)
    layers = to_device(make_layers("gqa", seed=4), device)
    pulled = [tensor[ids].view(3, 16, num_splits, 4 // num_splits, 32) for layer in host for tensor in layer]
    staging = torch.cat([x.permute(0, 2, 1, 3, 4).reshape(-1).view(torch.uint8) for x in pulled]).to(device)
    slices = retile_heads(GQA_BLOCK, num_splits)
    poll(ops.inject(layers, ids, staging, slices))  # prepares; the same again is what a request costs
    with standin.counting() as counted:
        poll(ops.inject(layers, ids, staging, slices))
    for layer, other in zip(layers, host, strict=True):
        for tensor, expected in zip(layer, other, strict=True):
            assert torch.equal(tensor.cpu()[ids].view(torch.int16), expected[ids].view(torch.int16))
    assert counted["event_records"] == 1
    assert counted["launches"] == (1 if backend == "extension+kernel" else 0)
    if backend == "extension+memcpy":
        assert (counted["copies_2d"] == 0) == refuse_2d


def test_extract_takes_a_range_of_heads(device, standin, backend):
    ids, host = [5, 6, 20], make_layers("gqa")
    layers = to_device(host, device)
    slices = slice_heads(GQA_BLOCK, 1, 2)
    staging = make_staging(layers, ids, device, slices)
    ops.extract(layers, ids, staging, slices).synchronize()
    wanted = [tensor[ids][:, :, 1:3].reshape(-1).view(torch.uint8) for layer in host for tensor in layer]
    assert torch.equal(staging.cpu(), torch.cat(wanted))


@pytest.mark.parametrize("num_layers", [1, 6, 24])
def test_costs_one_launch_and_one_event_whatever_the_layers(device, standin, backend, num_layers):
    layers = to_device(make_layers("gqa", num_layers), device)
    staging = make_staging(layers, IDS["scattered"], device)
    poll(ops.extract(layers, IDS["scattered"], staging))
    with standin.counting() as counted:
        poll(ops.extract(layers, IDS["scattered"], staging))
        poll(ops.inject(layers, IDS["scattered"], staging))
    assert counted["host_syncs"] == 0
    assert counted["event_records"] == 2
    if backend == "extension+kernel":
        assert (counted["launches"], counted["copies"]) == (2, 2)  # a copy of the block ids with each launch
    else:
        assert counted["launches"] == 0


def test_copies_of_consecutive_blocks_are_merged(device, standin, monkeypatch, backend):
    if backend != "extension+memcpy":
        pytest.skip("the kernel copies nothing by the runtime")
    layers = to_device(make_layers("gqa", 6), device)
    staging = make_staging(layers, range(10), device)
    poll(ops.extract(layers, range(10), staging))
    with standin.counting() as counted:
        poll(ops.extract(layers, list(range(10)), staging))
    assert counted["copies"] <= 12  # one for each tensor, not for each block


def test_no_blocks_is_an_event_and_nothing_else(device, standin, backend):
    layers = to_device(make_layers("gqa"), device)
    staging = torch.empty(64, dtype=torch.uint8, device=device)
    with standin.counting() as counted:
        poll(ops.inject(layers, [], staging))
    assert (counted["launches"], counted["event_records"]) == (0, 1)


def test_odd_bytes_move_by_copies_where_the_kernel_moves_words(device, standin, backend):
    host = [torch.arange(24 * 3 * 7, dtype=torch.int32).to(torch.uint8).view(24, 3, 7)]
    layers = [tensor.to(device) for tensor in host]
    staging = make_staging(layers, [4, 9], device)
    with standin.counting() as counted:
        ops.extract(layers, [4, 9], staging).synchronize()
    assert torch.equal(staging.cpu(), host[0][[4, 9]].reshape(-1))
    assert counted["launches"] == 0


def test_refuses_ids_and_staging_that_do_not_fit(device, standin, backend):
    layers = to_device(make_layers("gqa"), device)
    staging = make_staging(layers, [0], device)
    with pytest.raises(ValueError, match="block id 24 .* 24 blocks"):
        ops.extract(layers, [24], staging)
    with pytest.raises(ValueError, match="block id -1"):
        ops.inject(layers, [-1], staging)
    with pytest.raises(ValueError, match="2 blocks need"):
        ops.extract(layers, [0, 1], staging)
    with pytest.raises(ValueError, match="on cpu"):
        ops.extract(layers, [0], torch.empty(1 << 20, dtype=torch.uint8))


def test_a_refused_launch_fails_its_own_event_and_no_later_work(device, standin, backend):
    if backend != "extension+kernel":
        pytest.skip("nothing is launched")
    host = make_layers("gqa")
    layers = to_device(host, device)
    staging = make_staging(layers, [1], device)
    standin.fail_launches(1)
    failed = ops.extract(layers, [1], staging)
    with pytest.raises(RuntimeError, match="ACL error 100000"):
        failed.synchronize()
    ops.extract(layers, [1], staging).synchronize()
    assert torch.equal(staging.cpu(), take_blocks(host, [1]))


def test_the_shipped_build_has_no_defects(device, backend):
    from vllm_ascend_pd.npu.extension import load_extension

    module = load_extension(probing.probe().extension)
    with pytest.raises(ValueError, match="no defects"):
        module.set_defects(1)


@pytest.mark.timeout(240)  # starts a process that imports torch_npu
def test_compute_operators_of_the_stand_in_fail_loudly(device):
    code = "import torch, torch_npu; torch.zeros(4, device='npu').cpu()"  # ends torch_npu's queue for good
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ZerosLike" in done.stderr
