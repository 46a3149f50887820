# SPDX-License-Identifier: Apache-2.0
"""GGUF in, safetensors folder out: `python tools/demo_convert.py MODEL.gguf OUT_DIR`, then one prompt to prove it.

Runs in a process of its own, started by `tools/demo_model.py` (which puts gguf and accelerate on its path).
Traps that it knows: without `dequantize=True` the model cannot be saved; the quantisation must leave the
config; the head is tied to the embedding; the tokenizer made from a GGUF file does not add <bos>, without
which this model talks nonsense, and `add_bos_token` in its config is ignored: only the post-processor counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CHECK_PROMPT: Final = "Q: What is the capital of France?\nA:"
CHECK_ANSWER: Final = " The capital of France is Paris."


def convert(gguf: Path, out: Path) -> None:
    """Write tokenizer, weights (bfloat16) and config to `out`."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    _add_bos(out)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    config["architectures"] = ["Gemma3ForCausalLM"]
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _add_bos(out: Path) -> None:
    """Make every encoding with special tokens start with <bos>, as the model was trained."""
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    bos = next(token for token in tokenizer["added_tokens"] if token["content"] == "<bos>")
    start: dict[str, Any] = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos["id"]], "tokens": ["<bos>"]}},
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def check(out: Path) -> str | None:
    """Load what was written and answer one prompt greedily; None, or what is wrong."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer(CHECK_PROMPT, return_tensors="pt")
    if prompt.input_ids[0, 0].item() != tokenizer.bos_token_id:
        return f"the tokenizer does not put <bos> first: {prompt.input_ids[0, :4].tolist()}"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    answer = tokenizer.decode(tokens[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    if not answer.startswith(CHECK_ANSWER):
        return f"{CHECK_PROMPT!r} is answered with {answer!r}, wanted {CHECK_ANSWER!r}"
    return None


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    problem = check(Path(sys.argv[2]))
    if problem:
        sys.exit(f"the converted model is wrong: {problem}")
