# SPDX-License-Identifier: Apache-2.0
"""`extract` and `inject`: the blocks of all layers to or from a contiguous staging buffer, in one call.

On NPU tensors the best backend of `probing` does it on the current stream, in order with what torch queued before;
the call returns at once, the event tells when it is over, and staging lives until then whoever drops it. On other
tensors torch's operators do it. Callable from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from vllm_ascend_pd.npu.extension import Event, Group, make_group
from vllm_ascend_pd.npu.fallback import TorchGroup
from vllm_ascend_pd.npu.layers import CacheTensor, Layers, Slices, count_staging_bytes, flatten_layers
from vllm_ascend_pd.npu.probing import Backend, Found, probe

if TYPE_CHECKING:
    import torch

MAX_GROUPS: Final = 64  # a few cache groups, each with the slices of a few peers

_groups: OrderedDict[tuple[object, ...], Group] = OrderedDict()
_lock = threading.Lock()  # guards _groups; taken alone


def extract(
    layers: Layers, block_ids: Sequence[int] | torch.Tensor, staging: torch.Tensor, slices: Slices = None
) -> Event:
    """Gather blocks into `staging`: tensor by tensor, in each the blocks in the order of `block_ids`, slices packed.

    `layers` are the engine's cache tensors, dim 0 the block; `staging` is contiguous, of any dtype, on their device.

    Raises:
        PDConfigError: layers or slices cannot be moved.
        ValueError: a block id is out of range, or staging is too small.
        RuntimeError: the device refused.
    """
    return _prepare(layers, slices).extract(_to_ids(block_ids), staging)


def inject(
    layers: Layers, block_ids: Sequence[int] | torch.Tensor, staging: torch.Tensor, slices: Slices = None
) -> Event:
    """Scatter `staging` into blocks; with the slices of `retile_heads` in the same launch. Else as `extract`.

    What wrote staging must be over, or the current stream must wait for it: an earlier extract by its event, a pull by
    its own completion.
    """
    return _prepare(layers, slices).inject(_to_ids(block_ids), staging)


def compute_staging_bytes(layers: Layers, num_blocks: int, slices: Slices = None) -> int:
    """What staging must hold for this many blocks."""
    return count_staging_bytes(flatten_layers(layers, slices), num_blocks)


def forget_groups() -> None:
    """Drop what was prepared: the tensors of these layers are going away."""
    with _lock:
        _groups.clear()


def _prepare(layers: Layers, slices: Slices) -> Group:
    tensors = flatten_layers(layers, slices)
    device = tensors[0].tensor.device.type
    found = probe() if device == "npu" else Found(Backend.TORCH, ("not on an NPU",))
    if found.backend is Backend.TORCH:
        return TorchGroup(tensors)
    key = (found, str(tensors[0].tensor.device), tuple(_make_key(tensor) for tensor in tensors))
    with _lock:
        group = _groups.get(key)
        if group is None:
            group = _make_group(found, tensors)
            _groups[key] = group
            if len(_groups) > MAX_GROUPS:
                _groups.popitem(last=False)
        _groups.move_to_end(key)
    return group


def _make_key(tensor: CacheTensor) -> tuple[object, ...]:
    return (tensor.tensor.data_ptr(), tensor.block_bytes, tensor.tensor.shape[0], tensor.slices)


def _make_group(found: Found, tensors: Sequence[CacheTensor]) -> Group:
    if found.backend is Backend.TRITON:
        from vllm_ascend_pd.npu.triton_group import TritonGroup  # Triton is not there on other backends

        return TritonGroup(tensors)
    return make_group(found, tensors)


def _to_ids(block_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    import torch

    if isinstance(block_ids, torch.Tensor):
        return block_ids.to("cpu", torch.int64).contiguous()
    return torch.tensor(block_ids, dtype=torch.int64)
