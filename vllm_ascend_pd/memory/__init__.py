# SPDX-License-Identifier: Apache-2.0
"""The memory that holds a rank's KV cache: a shared file that a peer on the same machine can map."""

from __future__ import annotations

from vllm_ascend_pd.memory.arena import Arena, ArenaMemoryError, find_arena
from vllm_ascend_pd.memory.mapping import ALIGNMENT

__all__ = ["ALIGNMENT", "Arena", "ArenaMemoryError", "find_arena"]
