# SPDX-License-Identifier: Apache-2.0
"""Loads the torch_npu extension and makes its groups; the only file that touches it.

Loaded at the first use, from the thread that uses it: before that `ASCEND_RT_VISIBLE_DEVICES` may still change.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu.layers import CacheTensor
from vllm_ascend_pd.npu.probing import MODULE, Found, Kernel

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """The completion of an extract or inject."""

    def query(self) -> bool:
        """Whether it is over; never blocks. Raises RuntimeError when it failed."""

    def synchronize(self) -> None:
        """Block this thread until it is over. Raises RuntimeError when it failed."""

    def wait(self) -> None:
        """Make what is queued next on the current stream wait for it; the host goes on."""


class Group(Protocol):
    """The tensors of one cache group, prepared."""

    def extract(self, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        """Gather the blocks into staging."""

    def inject(self, block_ids: torch.Tensor, staging: torch.Tensor) -> Event:
        """Scatter staging into the blocks."""


class Extension(Protocol):
    """The compiled module."""

    def Kernel(self, entries: list[tuple[str, str]], grid: int) -> object:
        """Load kernel binaries."""

    def Group(self, tensors: list[object], kernel: object | None, device: str) -> Group:
        """Prepare tensors."""

    def collect(self) -> int:
        """Let go of what finished transfers held; the number of unfinished ones."""


@functools.cache
def load_extension(path: Path) -> Extension:
    """The module at this path. torch_npu is imported first: the extension's libraries are its own.

    Raises:
        PDConfigError: it does not load here, with the loader's words.
    """
    importlib.import_module("torch_npu")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise PDConfigError(f"{path} is not a Python extension")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise PDConfigError(
            f"{path} does not load: {error}. It must be built against the torch and torch_npu that are installed"
            " (docs/npu-data-path.md)"
        ) from error
    return cast(Extension, module)


@functools.cache
def _load_kernel(extension: Path, kernel: Kernel) -> object:
    return load_extension(extension).Kernel(list(kernel.entries), kernel.grid)


def make_group(found: Found, tensors: Sequence[CacheTensor]) -> Group:
    """Prepare tensors for the backend that was found; uploads the table of rows once."""
    assert found.extension is not None
    kernel = _load_kernel(found.extension, found.kernel) if found.kernel is not None else None
    described: list[object] = [tensor.describe() for tensor in tensors]
    return load_extension(found.extension).Group(described, kernel, str(tensors[0].tensor.device))
