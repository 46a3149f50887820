# SPDX-License-Identifier: Apache-2.0
"""The field's way: torch operators per layer and tensor. Settings: torch on one thread, or on all.

Staging is written in place (`out=`) and every tensor view is made beforehand, which the code in the field does not do.
The CPU's `index_copy_` goes element by element, so it gains from seeing bf16 pairs or fours as wider elements: nobody
has it so, but it is the strongest that torch does, and it is measured too (`per-layer-wide`).
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, ClassVar

import torch

from vllm_ascend_pd.bench.stages.memory import Blocks, Cut
from vllm_ascend_pd.bench.stages.methods import EXTRACT, INJECT, PULL, SCATTER, Clock, Method, Puller, RatioMethod


def make_views(cut: Cut, base: int, num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """[num_blocks, block_size, elements] of each layer and plane, layer-major."""
    views = []
    planes = [cut.tensors(base, plane, num_blocks) for plane in range(len(cut.shape.planes))]
    for layer in range(cut.num_layers):
        for plane, width in enumerate(cut.shape.planes):
            num_bytes = num_blocks * cut.block_size * width
            memory: Any = (ctypes.c_char * num_bytes).from_address(planes[plane][layer])
            flat = torch.frombuffer(memory, dtype=dtype)
            views.append(flat.view(num_blocks, cut.block_size, width // dtype.itemsize))
    return views


def list_threads(num_threads: int) -> list[str]:
    """As variants."""
    return sorted({"1 thread", f"{num_threads} thread{'s' if num_threads > 1 else ''}"})


def synchronize() -> None:
    """What a device needs between two stages; the CPU's operators have ended when they return."""


class PerLayer(Method):
    """extract: gather a layer's blocks; scatter: copy them to their place in the send buffer; pull; inject."""

    name, label = "per-layer", "per layer (torch)"

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._puller = Puller(num_threads)

    def variants(self) -> list[str]:
        """Torch's threads."""
        return list_threads(self._num_threads)

    def bind(self, cut: Cut, variant: str) -> None:
        """Views, and one layer's worth of scratch."""
        torch.set_num_threads(int(variant.split()[0]))
        self._src = make_views(cut, cut.src, cut.num_blocks)
        self._dst = make_views(cut, cut.dst, cut.num_blocks)
        self._send = make_views(cut, cut.send, cut.num_moved)
        self._receive = make_views(cut, cut.receive, cut.num_moved)
        self._scratch = [torch.empty_like(view) for view in self._send[: len(cut.shape.planes)]]
        self._puller.bind(cut)

    def run_stages(self, blocks: Blocks) -> dict[str, float]:
        """A sync after each stage of each layer."""
        src_ids, dst_ids = torch.tensor(blocks.src), torch.tensor(blocks.dst)
        step, clock = len(self._scratch), Clock()
        for first in range(0, len(self._src), step):
            for plane in range(step):
                torch.index_select(self._src[first + plane], 0, src_ids, out=self._scratch[plane])
            synchronize()
            clock.lap(EXTRACT)
            for plane in range(step):
                self._send[first + plane].copy_(self._scratch[plane])
            synchronize()
            clock.lap(SCATTER)
        self._puller.run()
        clock.lap(PULL)
        for first in range(0, len(self._dst), step):
            for plane in range(step):
                self._dst[first + plane].index_copy_(0, dst_ids, self._receive[first + plane])
            synchronize()
            clock.lap(INJECT)
        return clock.seconds

    def run_overall(self, blocks: Blocks) -> float:
        """The same calls."""
        src_ids, dst_ids = torch.tensor(blocks.src), torch.tensor(blocks.dst)
        step = len(self._scratch)
        start = time.perf_counter()
        for index, source in enumerate(self._src):
            scratch = self._scratch[index % step]
            torch.index_select(source, 0, src_ids, out=scratch)
            self._send[index].copy_(scratch)
        self._puller.run()
        for target, received in zip(self._dst, self._receive, strict=True):
            target.index_copy_(0, dst_ids, received)
        synchronize()
        return time.perf_counter() - start


class PerLayerDirect(RatioMethod):
    """The plain loop of torch operators: gather into the staging buffer, put into place; two ops per tensor."""

    name, label = "per-layer", "per layer (torch), 2 ops a tensor"

    dtypes: ClassVar[dict[str, torch.dtype]] = {"bf16": torch.bfloat16}

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def variants(self) -> list[str]:
        """Torch's threads, and as what it sees the bytes."""
        return [f"{threads}, {name}" for threads in list_threads(self._num_threads) for name in self.dtypes]

    def bind(self, cut: Cut, variant: str) -> None:
        """Views."""
        threads, _, name = variant.partition(", ")
        torch.set_num_threads(int(threads.split()[0]))
        dtype = self.dtypes[name]
        self._src = make_views(cut, cut.src, cut.num_blocks, dtype)
        self._dst = make_views(cut, cut.dst, cut.num_blocks, dtype)
        self._send = make_views(cut, cut.send, cut.num_moved, dtype)

    def run(self, blocks: Blocks) -> float:
        """Extract all layers, then inject all."""
        src_ids, dst_ids = torch.tensor(blocks.src), torch.tensor(blocks.dst)
        start = time.perf_counter()
        for source, staged in zip(self._src, self._send, strict=True):
            torch.index_select(source, 0, src_ids, out=staged)
        for target, staged in zip(self._dst, self._send, strict=True):
            target.index_copy_(0, dst_ids, staged)
        return time.perf_counter() - start


class PerLayerWide(PerLayerDirect):
    """The same with the bytes seen as wider elements."""

    name, label = "per-layer-wide", "per layer (torch), 2 ops a tensor, wide elements"
    dtypes: ClassVar[dict[str, torch.dtype]] = {"int32": torch.int32, "int64": torch.int64}


class PerLayerField(RatioMethod):
    """The loop as the field has it: gather into a new tensor, copy that into the send buffer, put into place."""

    name, label = "per-layer-field", "per layer (torch), as in the field"

    def __init__(self, num_threads: int) -> None:
        self._direct = PerLayerDirect(num_threads)

    def variants(self) -> list[str]:
        """Torch's threads."""
        return self._direct.variants()

    def bind(self, cut: Cut, variant: str) -> None:
        """Views."""
        self._direct.bind(cut, variant)

    def run(self, blocks: Blocks) -> float:
        """Three ops per tensor."""
        direct = self._direct
        src_ids, dst_ids = torch.tensor(blocks.src), torch.tensor(blocks.dst)
        start = time.perf_counter()
        for source, staged in zip(direct._src, direct._send, strict=True):
            staged.copy_(source[src_ids])
        for target, staged in zip(direct._dst, direct._send, strict=True):
            target[dst_ids] = staged
        return time.perf_counter() - start
