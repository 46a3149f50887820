# SPDX-License-Identifier: Apache-2.0
"""Which staging a rank gets: in which memory, and who copies. Runs in the worker's main thread, at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.engine.caches import split
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu.order import Order
from vllm_ascend_pd.plan.layout import CacheLayout
from vllm_ascend_pd.transfer.staging.buffer import StagingBuffer
from vllm_ascend_pd.transfer.staging.chunks import SLOT_BYTES, can_stage
from vllm_ascend_pd.transfer.staging.copier import Copier, HostCopier
from vllm_ascend_pd.transfer.staging.device import DeviceCopier, DeviceMemory
from vllm_ascend_pd.transfer.staging.reserve import count_slots


@dataclass(frozen=True)
class Staging:
    """A rank's buffer and who moves bytes between it and the caches."""

    buffer: StagingBuffer
    copier: Copier


def settle_transfer(config: PDConfig, vllm_config: Any) -> PDConfig:
    """`--pd-transfer auto` is staged where nothing else is ordered: on an NPU with a drafter.

    A drafter's caches are written after the token that the host waits for, so that a handoff can be made before they
    are. A straight pull does not ask the prefill side's device; an extract waits for its last step.

    Raises:
        PDConfigError: straight was asked for there.
    """
    has_drafter = getattr(vllm_config, "speculative_config", None) is not None
    if not has_drafter or str(vllm_config.device_config.device_type) != "npu":
        return config
    if config.transfer == "straight":
        raise PDConfigError(
            "--pd-transfer straight: with --speculative-config on an NPU the drafter's KV may be read before it is "
            "written; leave --pd-transfer out, or give staged"
        )
    return replace(config, transfer="staged")


def make_staging(
    config: PDConfig, layout: CacheLayout, kv_caches: Mapping[str, Any], order: Order, device: Any
) -> Staging | None:
    """The staging of one rank, or None where it does not stage.

    Raises:
        PDConfigError: `--pd-transfer staged` where that is not possible.
    """
    num_slots = count_slots(config)
    if not num_slots:
        return None
    if not can_stage(layout):
        if config.transfer == "staged":
            raise PDConfigError(f"--pd-transfer staged: a KV block of a layer is larger than {SLOT_BYTES} bytes")
        return None
    model_id = len(layout.caches)
    if device.type == "cpu":
        return Staging(StagingBuffer(num_slots, model_id), HostCopier())
    memory = DeviceMemory(num_slots * SLOT_BYTES, device)
    num_blocks = layout.caches[0][0].num_blocks
    parts = (part for cache in kv_caches.values() for part in split(cache, num_blocks))
    blocks = {int(part.data_ptr()): part.view(num_blocks, -1) for part in parts}
    return Staging(StagingBuffer(num_slots, model_id, memory), DeviceCopier(blocks, memory.tensor, order))
