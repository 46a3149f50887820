# SPDX-License-Identifier: Apache-2.0
"""Extract and inject by torch's operators, on CPU tensors: the same staging bytes as the device kernels'."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu import ops
from vllm_ascend_pd.npu.slices import BlockShape, Slice, retile_heads, slice_heads

NUM_BLOCKS = 12
GQA_BLOCK = BlockShape(num_tokens=8, num_heads=4, head_bytes=32)  # head dim 16, bf16


def make_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def make_gqa(num_layers: int = 3, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (make_tensor(NUM_BLOCKS, 8, 4, 16, seed=seed + 2 * i), make_tensor(NUM_BLOCKS, 8, 4, 16, seed=seed + 2 * i + 1))
        for i in range(num_layers)
    ]


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("ids", [[3], [2, 3, 4], [11, 0, 5]])
def test_extract_then_inject_moves_unlike_tensors_of_a_layer(ids):
    layers = [
        (make_tensor(NUM_BLOCKS, 8, 1, 64, seed=i), make_tensor(NUM_BLOCKS, 8, 1, 8, seed=9 + i)) for i in range(3)
    ]
    staging = torch.empty(ops.compute_staging_bytes(layers, len(ids)), dtype=torch.uint8)
    assert ops.extract(layers, ids, staging).query()
    assert torch.equal(staging, torch.cat([to_bytes(tensor[ids]) for layer in layers for tensor in layer]))
    targets = [tuple(torch.zeros_like(tensor) for tensor in layer) for layer in layers]
    ops.inject(targets, ids, staging)
    for layer, target in zip(layers, targets, strict=True):
        for tensor, written in zip(layer, target, strict=True):
            expected = torch.zeros_like(tensor)
            expected[ids] = tensor[ids]
            assert torch.equal(written.view(torch.int16), expected.view(torch.int16))


def test_extract_takes_a_range_of_heads():
    layers, ids = make_gqa(), [7, 1]
    slices = slice_heads(GQA_BLOCK, 1, 2)
    staging = torch.empty(ops.compute_staging_bytes(layers, 2, slices), dtype=torch.uint8)
    ops.extract(layers, ids, staging, slices)
    assert torch.equal(staging, torch.cat([to_bytes(t[ids][:, :, 1:3]) for layer in layers for t in layer]))


@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_inject_retiles_heads(num_splits):
    source, targets, ids = make_gqa(seed=1), make_gqa(seed=50), [4, 9, 0]
    shards = [t[ids].view(3, 8, num_splits, 4 // num_splits, 16).permute(0, 2, 1, 3, 4) for x in source for t in x]
    ops.inject(targets, ids, torch.cat([to_bytes(shard) for shard in shards]), retile_heads(GQA_BLOCK, num_splits))
    for layer, target in zip(source, targets, strict=True):
        for tensor, written in zip(layer, target, strict=True):
            assert torch.equal(written[ids].view(torch.int16), tensor[ids].view(torch.int16))


def test_views_into_a_larger_storage_keep_their_place():
    raw = make_tensor(4 * 10 * 6)
    layers = [raw.as_strided((10, 6), (24, 1), 6)]  # blocks in pages that other layers share
    staging = torch.empty(ops.compute_staging_bytes(layers, 2), dtype=torch.uint8)
    ops.extract(layers, [1, 8], staging)
    assert torch.equal(staging, to_bytes(torch.cat([raw[30:36], raw[198:204]])))


def test_slices_for_each_tensor_leave_others_whole():
    layers = make_gqa(1)
    slices = [slice_heads(GQA_BLOCK, 0, 1), [Slice(0, GQA_BLOCK.num_tokens * GQA_BLOCK.token_bytes)]]
    staging = torch.empty(ops.compute_staging_bytes(layers, 1, slices), dtype=torch.uint8)
    ops.extract(layers, [5], staging, slices)
    assert torch.equal(staging, torch.cat([to_bytes(layers[0][0][[5]][:, :, :1]), to_bytes(layers[0][1][[5]])]))


def test_refuses_what_does_not_fit():
    layers = make_gqa(1)
    staging = torch.empty(ops.compute_staging_bytes(layers, 1), dtype=torch.uint8)
    with pytest.raises(ValueError, match="block id 12 .* 12 blocks"):
        ops.extract(layers, [12], staging)
    with pytest.raises(ValueError, match="2 blocks need"):
        ops.inject(layers, [0, 1], staging)
    with pytest.raises(PDConfigError, match="given for 1 tensors, the layers have 2"):
        ops.extract(layers, [0], staging, [[Slice(0, 4)]])
    with pytest.raises(PDConfigError, match="whole elements"):
        ops.extract(layers, [0], staging, [Slice(1, 2)])
    with pytest.raises(PDConfigError, match="no tensor"):
        ops.extract([], [0], staging)
    with pytest.raises(PDConfigError, match="not contiguous"):
        ops.extract([layers[0][0].transpose(1, 2)], [0], staging)
    with pytest.raises(PDConfigError, match="do not divide"):
        retile_heads(GQA_BLOCK, 3)


def test_importing_loads_neither_torch_nor_torch_npu():
    code = (
        "import sys, vllm_ascend_pd.npu.ops as o; o.probe(); sys.exit(bool({'torch', 'torch_npu'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
