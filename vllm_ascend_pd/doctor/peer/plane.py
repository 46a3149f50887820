# SPDX-License-Identifier: Apache-2.0
"""A doctor's data plane: memory registered with the engine's own `datadist`, served to the peer and filled from it.

The same calls as an engine's worker, in the same order: start, register, link, `pull_blocks`. One at a time in a
process (LLMDataDist is a singleton). Blocks its caller, within deadlines. On NPUs: written to the interface, not run.
"""

from __future__ import annotations

import ctypes
import gc
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vllm_ascend_pd import datadist
from vllm_ascend_pd.doctor.peer import pattern
from vllm_ascend_pd.doctor.peer.messages import PlaneAddress, Pulled
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.memory.arena import Arena
from vllm_ascend_pd.memory.mapping import ALIGNMENT, round_up
from vllm_ascend_pd.secret import Secret

BLOCK_BYTES: Final = 32 << 10  # 16 tokens of a layer of a middle-sized model
NUM_TENSORS: Final = 8
LINK_TIMEOUT_MS: Final = 5000
ROUNDS: Final = 3
ROUNDS_WITHIN_S: Final = 2.0  # a slow wire is measured once
MAX_BYTES: Final = 1 << 30
_WORK_BYTES_PER_S: Final = 32e6  # of making or comparing test memory on a busy host: ten times the usual time


def work_seconds(num_bytes: int) -> float:
    """What making or comparing the test memory takes at most; no wire is in that."""
    return num_bytes / _WORK_BYTES_PER_S


class PlaneError(PDError):
    """The data plane cannot be tested; the message says why."""


class ProbeMemory(Protocol):
    """Aligned zeroed memory, where KV would lie."""

    address: int

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes there."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Look at bytes."""

    def clear(self) -> None:
        """All zero again."""


class ArenaMemory:
    """In a shared arena, as KV caches are on CPU."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self._arena = Arena.create(num_bytes, "doctor")
        except (MemoryError, OSError) as error:
            raise PlaneError(str(error)) from error
        self.address = self._arena.address

    def write(self, offset: int, data: bytes) -> None:
        """See ProbeMemory."""
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See ProbeMemory."""
        return ctypes.string_at(self.address + offset, num_bytes)

    def clear(self) -> None:
        """See ProbeMemory."""
        ctypes.memset(self.address, 0, self._arena.num_bytes)


class DeviceMemory:
    """In an NPU's memory, through torch_npu. Not run on an NPU."""

    def __init__(self, num_bytes: int, device: int) -> None:
        import torch

        try:
            __import__("torch_npu")
            self._whole = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=f"npu:{device}")
        except (ImportError, RuntimeError) as error:
            raise PlaneError(f"no memory on NPU {device}: {error}") from error
        start = -self._whole.data_ptr() % ALIGNMENT
        self._bytes = self._whole[start : start + num_bytes]
        self.address = int(self._bytes.data_ptr())

    def write(self, offset: int, data: bytes) -> None:
        """See ProbeMemory."""
        import torch

        self._bytes[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See ProbeMemory."""
        return bytes(self._bytes[offset : offset + num_bytes].cpu().numpy().tobytes())

    def clear(self) -> None:
        """See ProbeMemory. Waits for the device: what comes next is not ordered with torch's queue."""
        import torch

        self._bytes.zero_()
        npu: Any = getattr(torch, "npu", None)
        npu.synchronize()


@dataclass(frozen=True)
class Geometry:
    """How the test memory lies: each tensor of `num_blocks` blocks at a registered base."""

    num_blocks: int
    block_bytes: int = BLOCK_BYTES
    num_tensors: int = NUM_TENSORS

    @classmethod
    def of(cls, num_bytes: int) -> Geometry:
        """At least so many bytes in all."""
        return cls(max(1, -(-num_bytes // (BLOCK_BYTES * NUM_TENSORS))))

    @property
    def num_bytes(self) -> int:
        """That are moved."""
        return self.num_blocks * self.block_bytes * self.num_tensors

    @property
    def stride(self) -> int:
        """From one tensor to the next."""
        return round_up(self.num_blocks * self.block_bytes)

    def offset(self, tensor: int, block: int) -> int:
        """Of a block in the memory."""
        return tensor * self.stride + block * self.block_bytes


class DoctorPlane:
    """Source memory for the peer, destination memory for us. `start` once, `close` always."""

    def __init__(
        self, secret: Secret, host: str, geometry: Geometry, timeout_s: float, transport: str = "auto"
    ) -> None:
        self._secret = secret
        self._host = host
        self._geometry = geometry
        self._timeout_s = timeout_s
        self._transport = transport
        self._module = datadist.load()
        self._engine: Any = None
        self._cache: Any = None
        self._source: ProbeMemory | None = None
        self._target: ProbeMemory | None = None
        self._seed = secrets.randbits(63)

    def start(self) -> PlaneAddress:
        """Make and fill the memory, come up listening.

        Raises:
            PlaneError: no memory, no way to link, or the data plane refuses.
        """
        module, geometry = self._module, self._geometry
        way = datadist.choose_way(module, has_rank_table=False)
        if way is datadist.Way.TWO_SIDED:
            raise PlaneError("this CANN release links by rank table only: the first link of two engines tests it")
        settings = datadist.DataPlaneSettings(
            is_prefill=True,  # both sides listen
            host=self._host,
            way=way,
            sync_timeout_ms=max(1000, round(1000 * self._timeout_s)),
            secret_hex=self._secret.derive("datadist").hex(),
            host_transport=self._transport,
        )
        datadist.bind_thread(module, settings.device_index)
        self._source, self._target = self._make_memory(), self._make_memory()
        self._fill(self._source)
        cluster_id = secrets.randbits(63)
        try:
            engine = module.LLMDataDist(module.LLMRole.MIX, cluster_id)
            port = datadist.start(module, engine, settings)
            self._engine = engine
            self._register(cluster_id, 0, self._source)
            self._cache = self._register(cluster_id, 1, self._target)
        except (module.LLMException, PDError, RuntimeError, OSError) as error:
            raise PlaneError(f"the data plane does not come up on {self._host}: {error}") from error
        return PlaneAddress(
            cluster_id=cluster_id,
            host=self._host,
            port=port,
            num_blocks=geometry.num_blocks,
            block_bytes=geometry.block_bytes,
            num_tensors=geometry.num_tensors,
            seed=self._seed,
        )

    def pull(self, peer: PlaneAddress) -> Pulled:
        """Link, pull all of the peer's source memory a few times, verify every byte each time, unlink."""
        geometry = Geometry(peer.num_blocks, peer.block_bytes, peer.num_tensors)
        if geometry != self._geometry:
            return Pulled(problem=f"the test memories differ: {self._geometry} here, {geometry} there")
        started = time.monotonic()
        problem = self._link(peer)
        link_s = time.monotonic() - started
        if problem:
            return Pulled(problem=problem, link_seconds=link_s)
        try:
            transport = datadist.link_transport(self._engine, peer.cluster_id)
            seconds, problem = self._pull_rounds(peer)
        except self._module.LLMException as error:
            return Pulled(problem=f"the pull failed: {error}", link_seconds=link_s)
        finally:
            self._unlink(peer)
        return Pulled(
            problem=problem,
            transport=transport,
            num_bytes=geometry.num_bytes,
            seconds=seconds,
            link_seconds=link_s,
        )

    def close(self) -> None:
        """End links, stop listening, free the memory. Repeatable."""
        engine, self._engine, self._cache = self._engine, None, None
        if engine is not None:
            with suppress(self._module.LLMException):
                engine.finalize()
        self._source = self._target = None
        del engine
        gc.collect()  # an engine's objects refer to one another, and to the memory, which should be gone now

    def _make_memory(self) -> ProbeMemory:
        num_bytes = self._geometry.stride * self._geometry.num_tensors
        return ArenaMemory(num_bytes) if self._module.name == "host" else DeviceMemory(num_bytes, 0)

    def _fill(self, memory: ProbeMemory) -> None:
        geometry = self._geometry
        for tensor in range(geometry.num_tensors):
            for block in range(geometry.num_blocks):
                data = pattern.block_bytes(self._seed, tensor, block, geometry.block_bytes)
                memory.write(geometry.offset(tensor, block), data)

    def _register(self, cluster_id: int, model_id: int, memory: ProbeMemory) -> Any:
        module, geometry = self._module, self._geometry
        desc = module.CacheDesc(
            geometry.num_tensors, [geometry.num_blocks, geometry.block_bytes], module.DataType.DT_UINT8
        )
        bases = [memory.address + tensor * geometry.stride for tensor in range(geometry.num_tensors)]
        key = module.BlocksCacheKey(cluster_id, model_id)
        return self._engine.cache_manager.register_blocks_cache(desc, bases, key, remote_accessible=True)

    def _link(self, peer: PlaneAddress) -> str:
        codes = self._module.LLMStatusCode
        timeout_ms = min(LINK_TIMEOUT_MS, round(1000 * self._timeout_s))
        try:
            _, (code,) = self._engine.link_clusters([self._cluster(peer)], timeout_ms)
        except self._module.LLMException as error:
            return f"no link to {peer.host}:{peer.port}: {error}"
        if code != codes.LLM_SUCCESS:
            return f"no link to {peer.host}:{peer.port} within {timeout_ms} ms: {code!s}"
        return ""

    def _unlink(self, peer: PlaneAddress) -> None:
        with suppress(self._module.LLMException):
            self._engine.unlink_clusters([self._cluster(peer)], LINK_TIMEOUT_MS, False)

    def _cluster(self, peer: PlaneAddress) -> Any:
        cluster = self._module.LLMClusterInfo()
        cluster.remote_cluster_id = peer.cluster_id
        cluster.append_local_ip_info(self._host, 0)
        cluster.append_remote_ip_info(peer.host, peer.port)
        return cluster

    def _pull_rounds(self, peer: PlaneAddress) -> tuple[float, str]:
        """(best seconds, what is wrong)."""
        geometry, target = self._geometry, self._target
        assert target is not None
        key = self._module.BlocksCacheKey(peer.cluster_id, 0)
        sources, targets = list(range(geometry.num_blocks)), pattern.destinations(geometry.num_blocks)
        taken: list[float] = []
        while len(taken) < ROUNDS and sum(taken) < ROUNDS_WITHIN_S:
            target.clear()
            started = time.perf_counter()
            self._engine.cache_manager.pull_blocks(key, self._cache, sources, targets, tensor_num_per_layer=1)
            taken.append(time.perf_counter() - started)
            damage = pattern.find_damage(
                peer.seed,
                geometry.num_tensors,
                geometry.num_blocks,
                geometry.block_bytes,
                lambda tensor, block: target.read(geometry.offset(tensor, block), geometry.block_bytes),
            )
            if damage is not None:
                return min(taken), str(damage)
        return min(taken), ""
