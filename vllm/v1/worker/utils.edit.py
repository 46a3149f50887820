# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/v1/worker/utils.py` (0.32.0 only; 0.23.0: `gpu_model_runner.edit.py`): KV caches live in the arena.

Why here      The allocation is a bare `torch.zeros`; 0.32.0's allocation context is about device pools and cannot
              hand in host memory.
What it does  Replaces that one callee: with a PD role on CPU the bytes come from one shared memory file per rank,
              aligned; else `torch.zeros` is called as before.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream lets a connector provide the KV cache memory on CPU.
"""

from tools.fork import AddImport, Call, ReplaceCallee

LANES = ("0.32.0",)
UPSTREAM = ("vllm/v1/worker/utils.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.engine import hooks as pd_hooks"),
    ReplaceCallee(
        "pd_hooks.kv_zeros(kv_cache_config)",
        scope="allocate_kv_cache",
        anchor=Call("torch.zeros"),
    ),
)
