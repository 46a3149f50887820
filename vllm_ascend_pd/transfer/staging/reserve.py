# SPDX-License-Identifier: Apache-2.0
"""How much memory staging and links take: for whoever sizes KV caches, and for the doctor. Asks which data plane is
there."""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd import datadist
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.transfer.staging.chunks import SLOT_BYTES

PREFILL_SLOTS = 4  # many decode ranks read from one prefill rank
DECODE_SLOTS = 2  # one for each pull thread
LINKS_EXPECTED = 16  # of one rank, while nobody says how many peers there will be
ALIGNMENT = 2 << 20  # what is allocated more, so that a base can be put on a boundary


def count_slots(config: PDConfig) -> int:
    """Staging slots of a rank of this role; 0 where `--pd-transfer straight` needs none."""
    if config.transfer == "straight":
        return 0
    return PREFILL_SLOTS if config.role is PDRole.PREFILL else DECODE_SLOTS


def reserved_device_bytes(
    config: PDConfig, num_links: int = LINKS_EXPECTED, num_tensors: int = 0, module: Any = None
) -> int:
    """Device memory of one NPU rank that PD takes beside the KV caches.

    Its staging slots, its links (several MB each), and 2 MiB for each cache tensor, which vllm-ascend allocates that
    much larger to align it. `module`: the datadist implementation, where it is loaded already.
    """
    num_slots = count_slots(config)
    staging = num_slots * SLOT_BYTES + ALIGNMENT if num_slots else 0
    links = datadist.link_reserve_bytes(module or datadist.load(), num_links)
    return staging + links + num_tensors * ALIGNMENT
