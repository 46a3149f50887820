# SPDX-License-Identifier: Apache-2.0
"""What a contender does; one object per process, called by the worker's only thread. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_ascend_pd.bench.pool import Pool
from vllm_ascend_pd.bench.transfer.geometry import Geometry, Request

SOURCE, READER = "source", "reader"
PEER_TIMEOUT_S: Final = 120.0


class NotInstalledError(Exception):
    """What the contender needs is not in this environment."""


@dataclass(frozen=True)
class Job:
    """Everything a process is told at its start."""

    role: str
    geometry: Geometry
    pieces: tuple[int, ...]
    options: Mapping[str, str]
    num_threads: int


@dataclass(frozen=True)
class Timing:
    """Of one pull: from block ids (or whatever the contender takes for them) in hand to bytes in place."""

    seconds: float
    posting_seconds: float | None = None  # of these, until the transfer was under way, where it can be told


class Contender(ABC):
    """The source owns the bytes, the reader pulls them. `address` is the base of the process's pool."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.address = self.make_pool()

    def make_pool(self) -> int:
        """Memory of `pool_bytes`, touched; anonymous huge pages unless the contender brings its own."""
        self.pool = Pool(self.job.geometry.pool_bytes)
        return self.pool.address

    @property
    def source_address(self) -> int:
        """Where the pattern lies in this process, for a source."""
        return self.address

    def hello(self) -> dict[str, Any]:
        """Source: start serving; what the reader needs to find it."""
        return {}

    @abstractmethod
    def connect(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Reader: link to the source; what a person should know (versions, what was chosen)."""

    def accept(self) -> None:  # noqa: B027 (most have nothing to do)
        """Source: called while the reader connects, for those who must take part."""

    def variants(self, piece_bytes: int) -> list[str]:
        """Settings among which the best is searched before the rounds."""
        return ["default"]

    @abstractmethod
    def pull(self, request: Request, variant: str) -> Timing:
        """Reader: move the pieces."""

    def serve(self, request: Request, variant: str) -> None:  # noqa: B027 (most have nothing to do)
        """Source: called beside `pull`, for those who must take part."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """End connections."""
