# SPDX-License-Identifier: Apache-2.0
"""Our loggers write where vLLM's do: vLLM configures the logger "vllm" only, and ours are named `vllm_ascend_pd.*`."""

from __future__ import annotations

import logging


def follow_vllm_logging() -> None:
    """Give our root logger the handlers and the level of vLLM's. Call after vLLM was imported; repeats are free."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_ascend_pd")
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
