# SPDX-License-Identifier: Apache-2.0
"""The KV caches that are measured (peers.md §3.1). Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class KVShape:
    """bf16; `planes`: bytes per token of each tensor of a layer, K and V, or latent and rope."""

    name: str
    label: str
    num_layers: int
    planes: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.num_layers * sum(self.planes)


SHAPES: Final = (
    KVShape("qwen2.5-0.5b", "Qwen2.5-0.5B", 24, (2 * 64 * 2, 2 * 64 * 2)),
    KVShape("llama-3-8b", "Llama-3-8B", 32, (8 * 128 * 2, 8 * 128 * 2)),
    KVShape("qwen3-32b", "Qwen3-32B", 64, (8 * 128 * 2, 8 * 128 * 2)),
    KVShape("deepseek-v3", "DeepSeek-V3 (MLA)", 61, (512 * 2, 64 * 2)),
)
