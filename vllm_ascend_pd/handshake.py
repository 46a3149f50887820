# SPDX-License-Identifier: Apache-2.0
"""The record of named fields that a prefill and a decode engine compare before anything moves.

Built once in each engine core (`build_record`), sent in `wire.Hello`, compared by the prefill side (`compare`). Plain
JSON-able data; the comparison knows nothing of vLLM. Owns no thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_ascend_pd import __version__
from vllm_ascend_pd.wire import WIRE_VERSION

# In this order, so that the first difference is the most telling one. All must be equal in this release.
MUST_BE_EQUAL: Final = (
    "wire_version",
    "vllm_version",
    "fork_version",
    "model_config",
    "weights",
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "device",
    "data_plane",
    "block_size",
    "layout",
    "kv_layout",
    "attention_backend",
    "byte_order",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "speculative",
    "max_model_len",
)
# One common value is enough.
MUST_OVERLAP: Final = ("transports",)
# Told, for people and for later releases: the decode side samples every token itself today, and block hashes are
# not compared across instances.
INFORMATION: Final = (
    "model",
    "reasoning_parser",
    "structured_outputs",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "lora",
    "hash_seed",
    "data_plane_told",
)

ABSENT: Final = "(absent)"
UNKNOWN: Final = "(unknown)"  # could not be read there: equal to anything
MAX_SHOWN_CHARS: Final = 100
_MAX_CONFIG_VALUE_CHARS: Final = 400
# Keys of a Hugging Face config that say nothing about the KV: where it came from, and library defaults.
_VOLATILE: Final = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict"}
    | {"_attn_implementation", "_attn_implementation_autoset", "output_attentions", "output_hidden_states"}
)
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NUM_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True)
class Difference:
    """One field that keeps two engines from working together; values shortened for a message."""

    field: str
    ours: str
    theirs: str


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """What differs, the most telling field first; empty when the two can work together. Pure."""
    found: list[Difference] = []
    for field in MUST_BE_EQUAL:
        found += _differences(field, ours.get(field, ABSENT), theirs.get(field, ABSENT))
    for field in MUST_OVERLAP:
        mine, other = ours.get(field, ABSENT), theirs.get(field, ABSENT)
        if not isinstance(mine, list) or not isinstance(other, list) or not set(map(str, mine)) & set(map(str, other)):
            found.append(Difference(field, shorten(mine), shorten(other)))
    return found


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    """Down to the leaf, so that the message names `model_config.hidden_size` and not a hash."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*map(str, ours), *map(str, theirs)}):
            yield from _differences(f"{path}.{key}", ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield Difference(f"{path}.length", str(len(ours)), str(len(theirs)))
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(f"{path}[{index}]", mine, other)
    elif UNKNOWN in (ours, theirs):
        return
    elif type(ours) is not type(theirs) or ours != theirs:
        yield Difference(path, shorten(ours), shorten(theirs))


def shorten(value: Any) -> str:
    """A value for a message: whole when short, else its head and a hash that tells two long values apart."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: MAX_SHOWN_CHARS - 20]}… (hash {digest})"


# ---------------------------------------------------------------- building the record (reads a VllmConfig by attribute)


def build_record(
    vllm_config: Any,
    pd_config: Any,
    layout: Mapping[str, Any],
    data_plane: tuple[Mapping[str, str], Mapping[str, str]] = ({"implementation": "host"}, {}),
) -> dict[str, Any]:
    """This engine's record. Reads weight files.

    Args:
        layout: the cache groups (`plan.layout.layout_record`).
        data_plane: what must be equal about it, and what is told (`datadist.describe_data_plane`).
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    structured = vllm_config.structured_outputs_config
    record = {
        "wire_version": WIRE_VERSION,
        "fork_version": __version__,
        "vllm_version": _vllm_version(),
        "model": str(model.model),
        "model_config": describe_hf_config(model.hf_config.to_dict()),
        "weights": identify_weights(vllm_config),
        "quantization": _text(model.quantization),
        "dtype": _text(model.dtype),
        "kv_cache_dtype": _text(cache.cache_dtype),
        "device": _device(str(vllm_config.device_config.device_type)),
        "data_plane": dict(data_plane[0]),
        "data_plane_told": dict(data_plane[1]),
        "block_size": cache.block_size,
        "layout": layout,
        "kv_layout": find_kv_layout(),
        "attention_backend": _text(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "byte_order": sys.byteorder,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1),
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1),
        "speculative": _text(getattr(vllm_config.speculative_config, "method", None)),
        "max_model_len": model.max_model_len,
        "reasoning_parser": structured.reasoning_parser,
        "structured_outputs": structured.backend,
        "logits_processors": [_text(item) for item in model.logits_processors or ()],
        "logprobs_mode": _text(model.logprobs_mode),
        "max_logprobs": model.max_logprobs,
        "lora": vllm_config.lora_config is not None,
        "hash_seed": f"{cache.prefix_caching_hash_algo}/{os.environ.get('PYTHONHASHSEED', 'random')}",
        "transports": ["mapped", "tcp"] if pd_config.host_transport == "auto" else [pd_config.host_transport],
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def describe_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config without what may differ between two copies of one model; long values as a hash."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in _VOLATILE:
            continue
        if isinstance(value, Mapping):
            found[key] = describe_hf_config(value)
            continue
        text = json.dumps(value, sort_keys=True, default=str)
        is_long = len(text) > _MAX_CONFIG_VALUE_CHARS
        found[key] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}" if is_long else json.loads(text)
    return found


def identify_weights(vllm_config: Any) -> str:
    """What tells one set of weights from another, by content where the files are at hand."""
    model = vllm_config.model_config
    load_format = _text(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy, seed {model.seed}"
    folder = _weights_folder(str(model.model), model.revision, vllm_config.load_config.download_dir)
    files = [] if folder is None else sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
    if not files:
        return f"{model.model} revision {model.revision or 'default'}"
    return f"sampled:{sample_digest(files)}"


def sample_digest(files: Iterable[Path]) -> str:
    """Hex digest over names, sizes and evenly spaced samples: cheap, and another training run differs everywhere."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(index * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _weights_folder(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        return None  # one file: its folder may hold other models
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception:  # not a hub model, or not in the local cache: identified by name then
        return None


def find_kv_layout() -> str:
    """How the attention backend of this process lays a block out; its choice is known in worker processes only."""
    try:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return str(get_kv_cache_layout())
    except Exception:  # named otherwise in this release, or no device: the cache groups are compared anyway
        return ""


def _device(device_type: str) -> str:
    """What decides how a block is laid out inside: upstream's CPU kernels pack blocks for the instructions in use."""
    if device_type != "cpu":
        return device_type
    import torch

    has_amx = bool(torch.cpu._is_amx_tile_supported())
    return f"cpu {platform.machine()}{' amx' if has_amx else ''}"


def _vllm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def _text(value: Any) -> str:
    """Enum members, torch dtypes and classes by their name."""
    return str(getattr(value, "value", getattr(value, "__name__", value)))
