# SPDX-License-Identifier: Apache-2.0
"""Memory pools of one engine: `mem_pool_cfg` for device caches, `host_mem_pool_cfg` for host ones (§2, §4.2).

Each is one arena, taken when the engine starts, and handed out in pages of 2**page_shift bytes, first fit. Any
thread may allocate and free; each pool has its own lock, and nothing else is taken under it.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, require
from vllm_ascend_pd.datadist.types import Placement
from vllm_ascend_pd.memory.arena import Arena, ArenaMemoryError

_OPTIONS: Final = {Placement.DEVICE: "llm.MemPoolConfig", Placement.HOST: "llm.HostMemPoolConfig"}
_MIN_SHIFT: Final = 10
_MAX_SHIFT: Final = 30
_DEFAULT_SHIFT: Final = 16


@dataclass(frozen=True)
class PoolConfig:
    """Of one pool."""

    memory_bytes: int
    page_shift: int


def parse_pool_config(name: str, text: str) -> PoolConfig:
    """The JSON of one option. Raises LLMException(LLM_PARAM_INVALID)."""
    try:
        values = json.loads(text)
    except ValueError as error:
        fail(LLMStatusCode.LLM_PARAM_INVALID, f"{name} is not JSON: {error}")
    require(isinstance(values, dict), f"{name} must be a JSON object, not {text!r}")
    unknown = sorted(set(values) - {"memory_size", "page_shift"})
    require(not unknown, f"{name} has unknown fields {unknown}")
    size, shift = values.get("memory_size"), values.get("page_shift", _DEFAULT_SHIFT)
    for field, value in (("memory_size", size), ("page_shift", shift)):
        require(type(value) is int and value >= 0, f"{name}: {field} must be an unsigned integer, not {value!r}")
    require(_MIN_SHIFT <= shift <= _MAX_SHIFT, f"{name}: page_shift must be {_MIN_SHIFT}..{_MAX_SHIFT}, not {shift}")
    require(size >= 1 << shift, f"{name}: memory_size {size} is less than one page of {1 << shift} bytes")
    return PoolConfig(size, shift)


class MemoryPool:
    """Pages of one arena."""

    def __init__(self, name: str, config: PoolConfig) -> None:
        """Raises LLMException(LLM_OUT_OF_MEMORY)."""
        self.name = name
        self._page_bytes = 1 << config.page_shift
        self._num_pages = config.memory_bytes >> config.page_shift
        try:
            self._arena = Arena.create(self._num_pages * self._page_bytes, name)
        except (ArenaMemoryError, OSError) as error:
            fail(LLMStatusCode.LLM_OUT_OF_MEMORY, f"{name}: {error}")
        self._lock = threading.Lock()  # guards _taken
        self._taken: list[tuple[int, int]] = []  # (first page, pages), ascending

    @property
    def free_bytes(self) -> int:
        """What is not handed out; may lie in several pieces."""
        with self._lock:
            return (self._num_pages - sum(pages for _, pages in self._taken)) * self._page_bytes

    def allocate(self, num_bytes: int, count: int) -> list[int]:
        """`count` pieces, all or none. Raises LLMException(LLM_OUT_OF_MEMORY)."""
        addresses: list[int] = []
        for _ in range(count):
            address = self._take(-(-num_bytes // self._page_bytes))
            if address is None:
                self.free(addresses)
                fail(
                    LLMStatusCode.LLM_OUT_OF_MEMORY,
                    f"{self.name}: no room for piece {len(addresses)} of {count} of {num_bytes} bytes, "
                    f"{self.free_bytes} bytes are free",
                )
            addresses.append(address)
        return addresses

    def _take(self, pages: int) -> int | None:
        with self._lock:
            start = 0
            for position, (first, taken) in enumerate([*self._taken, (self._num_pages, 0)]):
                if first - start >= pages:
                    self._taken.insert(position, (start, pages))
                    return int(self._arena.address) + start * self._page_bytes
                start = first + taken
        return None

    def contains(self, address: int) -> bool:
        """Whether the address is in this pool."""
        return bool(0 <= address - self._arena.address < self._num_pages * self._page_bytes)

    def free(self, addresses: list[int]) -> None:
        """Give pieces back."""
        starts = {(address - self._arena.address) // self._page_bytes for address in addresses}
        with self._lock:
            self._taken = [piece for piece in self._taken if piece[0] not in starts]


class Pools:
    """The pools that the options ask for; none, one or both."""

    def __init__(self, options: dict[str, str]) -> None:
        """Raises LLMException: LLM_PARAM_INVALID before any memory is taken, LLM_OUT_OF_MEMORY."""
        configs = {
            placement: parse_pool_config(name, options[name])
            for placement, name in _OPTIONS.items()
            if options.get(name)
        }
        self._pools = {
            placement: MemoryPool(f"{placement.name.lower()} pool", config) for placement, config in configs.items()
        }

    @property
    def exist(self) -> bool:
        """Whether there is any."""
        return bool(self._pools)

    def get(self, placement: Placement) -> MemoryPool | None:
        """The pool of that placement."""
        return self._pools.get(placement)

    def free(self, addresses: list[int]) -> None:
        """Give back pieces of whichever pool they are from."""
        for pool in self._pools.values():
            pool.free([address for address in addresses if pool.contains(address)])
