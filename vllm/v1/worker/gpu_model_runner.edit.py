# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/v1/worker/gpu_model_runner.py` (0.23.0 only): KV caches live in the shared arena.

Why here      The allocation is a bare `torch.zeros` per tensor (0.32.0: see `utils.edit.py`).
What it does  Replaces that one callee: with a PD role on CPU the bytes come from one shared memory file per rank,
              aligned; else `torch.zeros` is called as before.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream lets a connector provide the KV cache memory on CPU.
"""

from tools.fork import AddImport, Call, ReplaceCallee

LANES = ("0.23.0",)
UPSTREAM = ("vllm/v1/worker/gpu_model_runner.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.engine import hooks as pd_hooks"),
    ReplaceCallee(
        "pd_hooks.kv_zeros(kv_cache_config)",
        scope="GPUModelRunner._allocate_kv_cache_tensors",
        anchor=Call("torch.zeros"),
    ),
)
