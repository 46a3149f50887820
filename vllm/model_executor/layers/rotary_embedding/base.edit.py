# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/model_executor/layers/rotary_embedding/base.py`: on CPU, per-head (3-D) queries are rotated right.

Why here      0.32.0's CPU kernel takes queries and keys as 2-D rows. MLA hands in 3-D views of wider tensors; then a
              batch of tokens is rotated wrongly and a single token rightly, so the KV of a token depends on what
              it was batched with, and no PD output can equal the aggregated one (docs/decisions/0005).
What it does  Sends 3-D queries through upstream's own PyTorch version. 2-D ones (all but MLA) are as before.
Kind          upstream bug        Forwarded  no
Drop when     The kernel's batch and single results agree for strided 3-D input (tests/vllm/test_rotary.py passes
              without this edit). 0.23.0 has no MLA on CPU, hence one lane.
"""

from tools.fork import InsertFirst

LANES = ("0.32.0",)
UPSTREAM = ("vllm/model_executor/layers/rotary_embedding/base.py",)

EDITS = (
    InsertFirst(
        "if query.dim() == 3:\n    return self.forward_native(positions, query, key)",
        scope="RotaryEmbedding.forward_cpu",
    ),
)
