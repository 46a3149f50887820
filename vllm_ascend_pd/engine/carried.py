# SPDX-License-Identifier: Apache-2.0
"""Which scheduler requests this release hands over: those whose KV depends on nothing but their token ids.

The API servers decide the same before the engine core (`front/front.py`); this is for those who come without one.
"""

from __future__ import annotations

from typing import Any


def not_carried(request: Any) -> str | None:
    """The reason why the KV of this request may not be paired by its token ids alone, or None."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if getattr(request, "mm_features", None):
        return "multimodal"
    if getattr(request, "lora_request", None) is not None:
        return "lora"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling"
    sampling = getattr(request, "sampling_params", None)
    if sampling is not None and sampling.prompt_logprobs is not None:
        return "prompt_logprobs"
    if getattr(request, "resumable", False):
        return "streaming_input"
    return None
