# SPDX-License-Identifier: Apache-2.0
"""Runs inside lane ascend-cpu's environment: vLLM with our edits beside vllm-ascend's Python, no CANN, no NPU.

`torch_npu`, `acl` and what vllm-ascend imports besides are stand-ins that accept everything, so this shows what is
imported, patched and defined, and runs only code that needs no device. Prints one line for each thing; exit status 1
when one is not as it must be. Started by `beside.py`, never imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

NUM_BLOCKS = 7
failures = 0


class Accepting(types.ModuleType):
    """A module that has every attribute."""

    __path__: list[str] = []
    __version__ = "1.14.0"  # numba asks scipy for it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `projects` where nobody else does."""

    def __init__(self) -> None:
        self.projects = {"torch_npu", "acl"}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Last on the path of finders."""
        if name.partition(".")[0] in self.projects:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module that accepts everything."""
        return Accepting(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def show(name: str, check: Callable[[], object]) -> None:
    """One line: `ok`, or what is wrong."""
    global failures
    try:
        result = check()
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    wrong = result is not True and result is not None
    failures += wrong
    print(f"{'FAIL' if wrong else 'ok'}  {name}{f': {result}' if wrong else ''}", flush=True)


def imports(name: str) -> None:
    """Whether a module can be imported."""
    show(f"imports {name}", lambda: importlib.import_module(name) and None)


def check_names() -> None:
    """What stands where after vllm-ascend has patched vLLM."""
    import vllm.v1.core.sched.scheduler as scheduling
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm_ascend.core.recompute_scheduler import RecomputeScheduler
    from vllm_ascend.utils import vllm_version_is

    scheduler = scheduling.Scheduler

    def edited(function: object) -> bool:
        return "pd_hooks." in inspect.getsource(inspect.unwrap(function))  # type: ignore[arg-type]

    show("vllm_version_is('0.23.0')", lambda: vllm_version_is("0.23.0"))
    show("vLLM's Scheduler is vllm-ascend's", lambda: scheduler.__module__.startswith("vllm_ascend.") or scheduler)
    show("its update_from_output ends in ours", lambda: edited(scheduler.update_from_output))
    show("its _connector_finished ends in ours", lambda: edited(scheduler._connector_finished))
    show("RecomputeScheduler's does not (refused)", lambda: not edited(RecomputeScheduler.update_from_output))
    connector = KVConnectorFactory.get_connector_class_by_name("DataDistConnector")
    show("our connector is registered and complete", lambda: not inspect.isabstract(connector))


def allocate(runner_class: Any, spec: Any, dims: tuple[int, int]) -> tuple[Any, Any]:
    """Raw K and V of one layer, by vllm-ascend's own allocation, on the CPU."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    runner = object.__new__(runner_class)
    transfer = SimpleNamespace(is_kv_consumer=False, is_kv_producer=True, kv_connector="DataDistConnector")
    runner.vllm_config = SimpleNamespace(kv_transfer_config=transfer, quant_config=None)
    runner.device, runner.use_compress, runner.use_sparse = "cpu", False, False
    runner.runner_only_attn_layers = set()
    runner._get_attention_kv_cache_dims = lambda name, spec: dims
    layer = "model.layers.0.self_attn.attn"
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[KVCacheTensor(size=NUM_BLOCKS * spec.page_size_bytes, shared_by=[layer])],
        kv_cache_groups=[KVCacheGroupSpec([layer], spec)],
    )
    return runner._allocate_kv_cache_tensors(config)[layer]  # type: ignore[no-any-return]


def check_caches() -> None:
    """What vllm-ascend allocates is what we register: aligned, blocks outermost, K and V (nope and rope) apart."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    from vllm_ascend_pd.engine.caches import check_regions, describe_caches

    common = {"block_size": 128, "dtype": torch.bfloat16}
    kinds = {
        "K and V": (FullAttentionSpec(num_kv_heads=2, head_size=64, **common), (64, 64), 2, 1),
        "K and V in kernel blocks": (FullAttentionSpec(num_kv_heads=2, head_size=64, **common), (64, 64), 2, 4),
        "nope and rope": (MLAAttentionSpec(num_kv_heads=1, head_size=576, **common), (512, 64), 1, 1),
    }
    for name, (spec, dims, heads, scale) in kinds.items():

        def registered(
            spec: Any = spec, dims: tuple[int, int] = dims, heads: int = heads, scale: int = scale
        ) -> object:
            raw = allocate(NPUModelRunner, spec, dims)
            parts = tuple(
                part.view(torch.bfloat16).view(NUM_BLOCKS * scale, 128 // scale, heads, size)
                for part, size in zip(raw, dims, strict=True)
            )
            group: Any = SimpleNamespace(layers=("layer",))
            layout = describe_caches({"layer": parts}, NUM_BLOCKS, [group])
            check_regions(layout, [group], is_device=True)
            sizes = sorted(region.block_bytes for cache in layout.caches for region in cache)
            wanted = sorted(128 * heads * size * 2 for size in dims)
            return sizes == wanted or f"blocks of {sizes} bytes, want {wanted}"

        show(f"caches that NPUModelRunner allocates are registered: {name}", registered)


def main() -> int:
    """Run."""
    finder = Finder()
    sys.meta_path.append(finder)
    import torch

    torch.npu = MagicMock()
    built = types.ModuleType("vllm_ascend._build_info")
    built.__device_type__ = "A2"  # type: ignore[attr-defined]
    sys.modules["vllm_ascend._build_info"] = built
    # transformers looks whether scipy is there when it is imported: before the stand-in
    for name in (
        "transformers.loss.loss_utils",
        "vllm.distributed.kv_transfer.kv_connector.v1.datadist.connector",
        "vllm.v1.worker.gpu_model_runner",
    ):
        imports(name)
    finder.projects |= {"scipy", "pandas", "torchvision", "mooncake", "xlite", "arctic_inference", "memcache_hybrid"}
    for name in ("patch.platform", "core.recompute_scheduler", "worker.worker", "worker.model_runner_v1"):
        imports(f"vllm_ascend.{name}")
    check_names()
    check_caches()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
