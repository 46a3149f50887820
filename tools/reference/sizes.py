# SPDX-License-Identifier: Apache-2.0
"""`kv-sizes.md`: KV bytes per token of common models, from the numbers of their configurations; and of any model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.reference.markdown import page, table

BYTES_PER_ELEMENT: Final = 2  # bf16 and fp16


@dataclass(frozen=True)
class Model:
    """What of a `config.json` decides the KV's size. MLA where `latent` is not 0."""

    name: str
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0  # kv_lora_rank + qk_rope_head_dim

    @property
    def token_bytes(self) -> int:
        """Of all layers, on an instance with one rank."""
        per_layer = self.latent if self.latent else 2 * self.kv_heads * self.head_dim
        return self.layers * per_layer * BYTES_PER_ELEMENT

    def rank_token_bytes(self, tensor_parallel: int) -> int:
        """On one rank: heads are split, then repeated; MLA's latent is on every rank."""
        if self.latent:
            return self.token_bytes
        return self.token_bytes * max(1, self.kv_heads // tensor_parallel) // self.kv_heads

    def moved_token_bytes(self, tensor_parallel: int) -> int:
        """By all ranks of an instance together."""
        return tensor_parallel * self.rank_token_bytes(tensor_parallel)


MODELS: Final = (
    Model("Qwen2.5-0.5B", 24, 2, 64),
    Model("Qwen2.5-7B", 28, 4, 128),
    Model("Llama-3.1-8B", 32, 8, 128),
    Model("Qwen3-8B", 36, 8, 128),
    Model("Qwen3-30B-A3B", 48, 4, 128),
    Model("Qwen3-32B", 64, 8, 128),
    Model("Llama-3.3-70B", 80, 8, 128),
    Model("Qwen3-235B-A22B", 94, 4, 128),
    Model("DeepSeek-V2-Lite", 27, latent=512 + 64),
    Model("DeepSeek-V3, DeepSeek-R1", 61, latent=512 + 64),
)
_PROMPT: Final = 4096
_TENSOR_PARALLEL: Final = (1, 4, 8, 16)


def read_config(path: Path) -> Model:
    """The model of a Hugging Face `config.json`. Raises KeyError for one that has other names, ValueError for "
    "windows."""
    config: Mapping[str, Any] = json.loads(path.read_text())
    config = config.get("text_config", config)
    layers = int(config["num_hidden_layers"])
    if "kv_lora_rank" in config:
        return Model(str(path), layers, latent=int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return Model(str(path), layers, int(config.get("num_key_value_heads") or heads), head_dim)


def show(num_bytes: float) -> str:
    """KiB, MiB or GiB with three digits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def model_table(models: tuple[Model, ...]) -> str:
    """One line per model."""
    rows = []
    for model in models:
        ranks = [show(model.rank_token_bytes(size)) for size in _TENSOR_PARALLEL]
        rows.append((model.name, show(model.token_bytes), *ranks, show(_PROMPT * model.token_bytes)))
    head = ("model", "per token", *(f"per token and rank, TP {size}" for size in _TENSOR_PARALLEL), f"{_PROMPT} tokens")
    return table(head, rows)


def render() -> str:
    """The page."""
    return page(
        "KV bytes per token",
        "bf16 or fp16, which is what this release moves as it lies in the cache. Grouped-query attention: "
        "`layers x 2 x KV heads x head size x 2 bytes`. MLA: `layers x (kv_lora_rank + qk_rope_head_dim) x 2 bytes`. "
        "With more ranks than KV heads each head is on several ranks. MLA's latent is whole on every rank, so an "
        "instance "
        "of TP 16 moves it 16 times, each rank from the prefill rank of its own number.",
        model_table(MODELS),
        "The last column is one copy of a prompt of 4096 tokens. Models with sliding windows keep less than the "
        "formula "
        "says: the layers with a window only the blocks inside it. Draft layers (MTP) are not counted: speculative "
        "decoding does not go with `--pd-role` in this release.",
        "For another model: `python -m tools.reference kv path/to/config.json`.",
    )
