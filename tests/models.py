# SPDX-License-Identifier: Apache-2.0
"""Tiny context-sensitive models, made on the fly and cached under a hash of their recipe.

`initializer_range` 0.1 matters: with 0.02 the greedy output hardly depends on the prompt, so a wrong KV cache would
go unnoticed. `tests/e2e/test_models.py` checks each architecture's sensitivity. Not imported by an engine process;
the models are made in a process of their own (`python -m tests.models NAME FOLDER`), so that the test process and
the zygote never run a torch operation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.cache import get_cache_root, publish, staging

RECIPE_VERSION = 3
VOCAB = 512  # 256 bytes, <s>, </s>, and room
BOS, EOS = 256, 257


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """One recipe. `block_size` is what its attention backend takes on CPU."""

    name: str
    config_class: str
    model_class: str
    config: dict[str, Any]
    block_size: int = 32
    window: int = 0  # of its sliding layers

    @property
    def path(self) -> Path:
        """Where the model is, or will be."""
        text = json.dumps([RECIPE_VERSION, dataclasses.asdict(self)], sort_keys=True)
        return get_cache_root() / "models" / f"tiny-{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}

MODELS = {
    model.name: model
    for model in (
        # The shape of a 0.5B Qwen2.5, on which an earlier connector gave wrong text.
        TinyModel(
            "gqa2",
            "Qwen2Config",
            "Qwen2ForCausalLM",
            _COMMON | {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
        ),
        TinyModel(
            "gqa4",
            "LlamaConfig",
            "LlamaForCausalLM",
            _COMMON | {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4},
        ),
        TinyModel(
            "mha",
            "LlamaConfig",
            "LlamaForCausalLM",
            _COMMON | {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8},
        ),
        # vLLM 0.32.0 on CPU without AMX fixes the MLA block size to 16 (reference/vllm.md). YaRN as DeepSeek-V2 has
        # it: upstream's plain CPU rotary kernel is wrong for MLA's strided views, and output then depends on the batch.
        TinyModel(
            "mla",
            "DeepseekV2Config",
            "DeepseekV2ForCausalLM",
            _COMMON
            | {
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 64,
                "v_head_dim": 64,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 128,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "topk_method": "greedy",
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": False,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
            block_size=16,
        ),
        # Hybrid: three cache groups over two raw tensors, and a window that short prompts outgrow.
        TinyModel(
            "sliding",
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            _COMMON
            | {
                "num_hidden_layers": 6,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "pad_token_id": 0,
            },
            window=64,
        ),
    )
}


def ensure_model(name: str) -> Path:
    """The folder of a tiny model, made now if it is not there."""
    model = MODELS[name]
    if not (model.path / "config.json").is_file():
        with staging(model.path.parent) as work:
            command = [sys.executable, "-m", "tests.models", name, str(work / "model")]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            root = Path(__file__).resolve().parents[1]
            done = subprocess.run(command, cwd=root, env=env, text=True, capture_output=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"making the tiny model {name} failed:\n{done.stderr[-3000:]}")
            publish(work / "model", model.path)
    return model.path


def build_model(name: str, folder: str) -> None:
    """Write tokenizer, configuration and random weights."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    recipe = MODELS[name]
    os.makedirs(folder, exist_ok=True)
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"<s>": BOS, "</s>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, recipe.config_class)(**recipe.config)
    network = getattr(transformers, recipe.model_class)(config).float()
    _randomise_vectors(network)
    network.save_pretrained(folder)


def _randomise_vectors(network: Any) -> None:
    """Biases and norm weights start as constants; give them values, so that nothing about them is trivial."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


if __name__ == "__main__":
    build_model(sys.argv[1], sys.argv[2])
