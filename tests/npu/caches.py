# SPDX-License-Identifier: Apache-2.0
"""Cache tensors as vllm-ascend lays them out: tuples per layer, dim 0 the block."""

from __future__ import annotations

import torch

NUM_BLOCKS = 24
SHAPES = {
    "gqa": [(NUM_BLOCKS, 16, 4, 32), (NUM_BLOCKS, 16, 4, 32)],
    "mla": [(NUM_BLOCKS, 16, 1, 512), (NUM_BLOCKS, 16, 1, 64)],
    "mla-indexer": [(NUM_BLOCKS, 16, 1, 512), (NUM_BLOCKS, 16, 1, 64), (NUM_BLOCKS + 8, 16, 1, 128)],
}
IDS = {"one": [7], "consecutive": [4, 5, 6, 7, 8], "scattered": [21, 2, 13, 3, 0], "descending": [9, 8, 7]}


def make_layers(kind: str, num_layers: int = 4, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """Random bytes on the host, bf16."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(
            torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
            for shape in SHAPES[kind]
        )
        for _ in range(num_layers)
    ]


def to_device(layers, device):
    """The same bytes on the device."""
    return [tuple(tensor.to(device) for tensor in layer) for layer in layers]


def clone(layers):
    """A copy on the host."""
    return [tuple(tensor.clone() for tensor in layer) for layer in layers]


def are_same(layers, others) -> bool:
    """Bit by bit."""
    pairs = [
        (a.cpu().view(torch.int16), b.cpu().view(torch.int16))
        for x, y in zip(layers, others, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return all(torch.equal(a, b) for a, b in pairs)


def take_blocks(layers, ids) -> torch.Tensor:
    """What staging must hold, written without our code."""
    return torch.cat([tensor[ids].reshape(-1).view(torch.uint8) for layer in layers for tensor in layer])
