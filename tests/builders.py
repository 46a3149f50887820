# SPDX-License-Identifier: Apache-2.0
"""Prompts, sampling parameters and engine arguments that tests share."""

from __future__ import annotations

import random
from typing import Any

from tests.models import MODELS, ensure_model

NUM_TOKENS = 16  # of each answer
MAX_MODEL_LEN = 1024


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random byte tokens; other seeds share nothing."""
    rng = random.Random(f"{seed}")
    return [rng.randrange(256) for _ in range(length)]


def sampling(max_tokens: int = NUM_TOKENS, **extra: Any) -> dict[str, Any]:
    """Greedy, no early end."""
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **extra}


def prefill_sampling(**params: Any) -> dict[str, Any]:
    """The first leg of the two-phase protocol."""
    return sampling(1, extra_args={"kv_transfer_params": {"do_remote_decode": True, **params}})


def decode_sampling(kv_transfer_params: dict[str, Any] | None, max_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """The second leg, with what the first returned."""
    return sampling(max_tokens, extra_args={"kv_transfer_params": kv_transfer_params})


def engine_kwargs(model: str, **overrides: Any) -> dict[str, Any]:
    """`LLM` arguments of a small engine of a tiny model (or of a model folder)."""
    tiny = MODELS.get(model)
    arguments: dict[str, Any] = {
        "model": str(ensure_model(model)) if tiny else model,
        "block_size": tiny.block_size if tiny else 32,
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 64 << 20,
        "dtype": "float32",
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        "seed": 0,
    }
    return arguments | overrides
