# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself when a link is made, shared by the dialling and the accepting side."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

from vllm_ascend_pd.datadist.host.descriptors import read_boot_id
from vllm_ascend_pd.datadist.host.linktable import LinkTable
from vllm_ascend_pd.datadist.host.options import EngineOptions
from vllm_ascend_pd.datadist.host.table import CacheTable
from vllm_ascend_pd.datadist.host.watching import LinkWatcher

SOCKET_PREFIX: Final = "vllm-pd-"


@dataclass(frozen=True)
class Identity:
    """One engine: its id, options, caches and links."""

    cluster_id: int
    options: EngineOptions
    caches: CacheTable
    links: LinkTable
    watcher: LinkWatcher
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    boot_id: str = field(default_factory=read_boot_id)

    @property
    def timeout_s(self) -> float:
        """Of every transfer."""
        return self.options.sync_timeout_ms / 1000

    def may_map(self, peer_transport: str, peer_boot_id: str) -> bool:
        """Whether both sides allow it and are on one machine."""
        allowed = "tcp" not in (self.options.transport, peer_transport)
        return allowed and self.boot_id != "" and self.boot_id == peer_boot_id
