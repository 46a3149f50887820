# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/v1/core/kv_cache_utils.py`: every layer of the shared backing starts on a 2 MiB boundary.

Why here      0.32.0 lays all layers into one buffer, `num_blocks * block_bytes` apart; the data plane registers each
              layer and needs 2 MiB-aligned bases. Only the number of blocks decides the stride, and it is fixed here.
What it does  Rounds the number of blocks down when this engine has a PD role. 0.23.0 allocates layer by layer and
              needs no rounding, hence one lane.
Kind          deliberately different        Forwarded  no
Drop when     Upstream aligns layer strides.
"""

from tools.fork import AddImport, Assignment, InsertAfter

LANES = ("0.32.0",)
UPSTREAM = ("vllm/v1/core/kv_cache_utils.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.engine import hooks as pd_hooks"),
    InsertAfter(
        "num_blocks = pd_hooks.round_num_blocks(vllm_config, kv_cache_groups, num_blocks)",
        scope="get_kv_cache_config_from_groups",
        anchor=Assignment("num_blocks", callee="may_override_num_blocks"),
    ),
)
