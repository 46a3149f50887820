# SPDX-License-Identifier: Apache-2.0
"""The cache tensors of one group as extract and inject see them: a flat list in layer order, with their slices.

vllm-ascend keeps a tuple of tensors per layer: (K, V), (nope, rope), or an indexer's; dim 0 of each is the block. The
tensors are the engine's and stay where they are for its lifetime; only addresses and strides are kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu.slices import Slice

if TYPE_CHECKING:
    import torch

Layers: TypeAlias = "Sequence[torch.Tensor | Sequence[torch.Tensor]]"
Slices: TypeAlias = "Sequence[Slice] | Sequence[Sequence[Slice]] | None"


@dataclass(frozen=True)
class CacheTensor:
    """One tensor and what of its blocks moves."""

    tensor: torch.Tensor
    slices: tuple[Slice, ...]

    @property
    def block_bytes(self) -> int:
        """From one block to the next."""
        return int(self.tensor.stride(0) * self.tensor.element_size())

    @property
    def packed_bytes(self) -> int:
        """What one block takes in staging."""
        return sum(piece.packed_bytes for piece in self.slices)

    def describe(self) -> tuple[int, int, int, list[tuple[int, int, int, int]]]:
        """As the extension takes it: address, block stride, blocks, slices."""
        pieces = [(piece.offset, piece.num_bytes, piece.count, piece.stride) for piece in self.slices]
        return (self.tensor.data_ptr(), self.block_bytes, self.tensor.shape[0], pieces)


def flatten_layers(layers: Layers, slices: Slices = None) -> tuple[CacheTensor, ...]:
    """All tensors, layer by layer, in the order of each layer's tuple.

    `slices` None moves whole blocks; a sequence of `Slice` holds for every tensor; a sequence of sequences has one
    entry for each tensor, in this function's order.

    Raises:
        PDConfigError: no tensors, unlike devices, a block that is not contiguous, or slices for another number of
            tensors.
    """
    tensors: list[torch.Tensor] = []
    for layer in layers:
        tensors += [layer] if hasattr(layer, "data_ptr") else layer
    if not tensors:
        raise PDConfigError("layers: there is no tensor in any layer")
    per_tensor = _spread_slices(slices, len(tensors))
    made = []
    for index, (tensor, pieces) in enumerate(zip(tensors, per_tensor, strict=True)):
        if tensor.device != tensors[0].device:
            raise PDConfigError(f"layers: tensor {index} is on {tensor.device}, tensor 0 on {tensors[0].device}")
        if not tensor[0].is_contiguous():
            raise PDConfigError(f"layers: a block of tensor {index} is not contiguous: strides {tensor.stride()}")
        whole = (Slice(0, tensor[0].numel() * tensor.element_size()),)
        made.append(CacheTensor(tensor, tuple(pieces) if pieces is not None else whole))
    return tuple(made)


def _spread_slices(slices: Slices, num_tensors: int) -> Sequence[Sequence[Slice] | None]:
    if slices is None:
        return [None] * num_tensors
    if all(isinstance(piece, Slice) for piece in slices):
        return [[piece for piece in slices if isinstance(piece, Slice)]] * num_tensors
    nested = [[*entry] for entry in slices if not isinstance(entry, Slice)]
    if len(nested) != num_tensors:
        raise PDConfigError(f"slices: given for {len(nested)} tensors, the layers have {num_tensors}")
    return nested


def count_staging_bytes(tensors: Sequence[CacheTensor], num_blocks: int) -> int:
    """What staging must hold for this many blocks."""
    return num_blocks * sum(tensor.packed_bytes for tensor in tensors)
