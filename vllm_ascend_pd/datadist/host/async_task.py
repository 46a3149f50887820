# SPDX-License-Identifier: Apache-2.0
"""`transfer_cache_async`: one thread per job walks the layers and pushes each as soon as it is complete (§4.6).

Unlike the real engine's thread it maps layers relative to the start of both ranges, and every failure, also an
exception of the caller's synchronizer, is a result and never a silent success.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.datadist.host.transfers import PushRequest
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode, check_type, check_uint32, check_uint64, require
from vllm_ascend_pd.datadist.transfer_types import LayerSynchronizer, TransferWithCacheKeyConfig
from vllm_ascend_pd.datadist.types import BlocksCacheKey, Cache, Placement, check_block_ids

logger = logging.getLogger(__name__)

_PER_LAYER: Final = 2


@dataclass(frozen=True)
class TransferJob:
    """The arguments of one call."""

    cache: Cache
    synchronizer: LayerSynchronizer
    configs: Sequence[TransferWithCacheKeyConfig]
    src_blocks: Sequence[int] | None
    dst_blocks: Sequence[int] | None
    chunk_bytes: int | None

    @property
    def num_layers(self) -> int:
        """Of the source."""
        return int(self.cache.cache_desc.num_tensors) // _PER_LAYER

    def check(self) -> None:
        """Raises TypeError, ValueError, LLMException(LLM_PARAM_INVALID)."""
        check_type("src_cache", self.cache, Cache, allow_none=False)
        check_type("layer_synchronizer", self.synchronizer, LayerSynchronizer, allow_none=False)
        configs, what = self.configs, "transfer_configs"
        check_type(what, configs, (list, tuple), TransferWithCacheKeyConfig, allow_none=False)  # direct mode
        for name, blocks in (("src_block_indices", self.src_blocks), ("dst_block_indices", self.dst_blocks)):
            if blocks is not None:
                check_block_ids(name, blocks)
        if self.chunk_bytes is not None:
            check_uint64("dst_block_memory_size", self.chunk_bytes)
        require(len(configs) > 0, "transfer_configs must not be empty")
        require(self.cache.cache_desc.placement == Placement.DEVICE, "src_cache must not be in host memory")
        tensors = self.cache.cache_desc.num_tensors
        require(tensors % _PER_LAYER == 0, f"src_cache has {tensors} tensors, which is odd")
        self._check_blocks()
        for config in configs:
            self._check_config(config)

    def _check_blocks(self) -> None:
        src, dst = self.src_blocks or (), self.dst_blocks or ()
        require(not src or self.cache.is_blocks_cache, "src_block_indices of a cache that is not one of blocks")
        require(not src or len(dst) > 0, "dst_block_indices must be given with src_block_indices")
        require(not src or len(src) == len(dst), f"{len(src)} source blocks for {len(dst)} destination blocks")
        if not dst:
            require(not self.chunk_bytes, "dst_block_memory_size needs dst_block_indices")
        elif not src:
            require(not self.cache.is_blocks_cache, "src_block_indices must be given for a blocks cache")
            require(bool(self.chunk_bytes), "dst_block_memory_size must be given for blocks from a cache of slots")
            tensor_bytes = self.cache.cache_desc.size
            in_range = self.chunk_bytes is not None and self.chunk_bytes < tensor_bytes
            require(in_range, f"dst_block_memory_size {self.chunk_bytes}: a tensor has {tensor_bytes} bytes")

    def _check_config(self, config: TransferWithCacheKeyConfig) -> None:
        layers = config.src_layer_range
        require(layers.stop <= self.num_layers, f"src_layer_range {layers} of a cache of {self.num_layers} layers")
        by_blocks = isinstance(config.cache_key, BlocksCacheKey)
        require(not self.dst_blocks or by_blocks, "dst_block_indices need a BlocksCacheKey")
        if by_blocks and not self.dst_blocks:
            require(self.cache.is_blocks_cache, "dst_block_indices must be given with a BlocksCacheKey")
        if self.src_blocks or self.cache.is_blocks_cache:
            require(config.src_batch_index == 0, f"src_batch_index {config.src_batch_index} of a blocks cache")

    def make_request(self, config: TransferWithCacheKeyConfig, layer: int) -> PushRequest:
        """The push of one layer to one destination."""
        target = config.dst_layer_range.start + layer - config.src_layer_range.start
        blocks: tuple[Sequence[int], Sequence[int]] | None = None
        if self.dst_blocks:
            blocks = (self.src_blocks or (), self.dst_blocks)
        elif isinstance(config.cache_key, BlocksCacheKey):
            blocks = ((0,), (0,))  # no lists at all: one block, as clients of the real engine expect
        return PushRequest(
            config.cache_key,
            self.cache.cache_id,
            blocks,
            range(layer, layer + 1),
            range(target, target + 1),
            _PER_LAYER,
            config.src_batch_index,
            0 if self.src_blocks else int(self.chunk_bytes or 0),
        )


class CacheTask:
    """A running or ended job."""

    def __init__(self, job: TransferJob, push: Callable[[PushRequest], None]) -> None:
        self._job = job
        self._push = push
        self._lock = threading.Lock()  # guards _results
        self._results: dict[int, LLMStatusCode | None] = {config.dst_cluster_id: None for config in job.configs}
        self._left = {config.dst_cluster_id: 0 for config in job.configs}  # layers to send; of the thread alone
        for config in job.configs:
            self._left[config.dst_cluster_id] += len(config.src_layer_range)
        self._total = dict(self._left)
        self._thread = threading.Thread(target=self._run, name="datadist-layers")
        self._thread.start()

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait; the first failure, or success. LLM_TIMEOUT while it still runs."""
        if not self._wait(timeout_in_millis):
            return LLMStatusCode.LLM_TIMEOUT
        failures = [status for status in self._copy() if status]
        return failures[0] if failures else LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait; per destination cluster how it ended, None: not tried. All LLM_TIMEOUT while it still runs."""
        done = self._wait(timeout_in_millis)
        results = self._copy()
        return results if done else [LLMStatusCode.LLM_TIMEOUT] * len(results)

    def _wait(self, timeout_ms: int | None) -> bool:
        if timeout_ms is not None:
            check_uint32("timeout_in_millis", timeout_ms)
        self._thread.join(None if timeout_ms is None else timeout_ms / 1000)
        return not self._thread.is_alive()

    def _copy(self) -> list[LLMStatusCode | None]:
        with self._lock:
            return list(self._results.values())

    def _record(self, cluster_id: int, status: LLMStatusCode) -> None:
        with self._lock:
            if self._results[cluster_id] is None:
                self._results[cluster_id] = status

    def _run(self) -> None:
        for layer in range(self._job.num_layers):
            wanted = [config for config in self._job.configs if layer in config.src_layer_range]
            if wanted and not self._send_layer(layer, wanted):
                break
        for cluster_id, left in self._left.items():
            if left == 0:
                self._record(cluster_id, LLMStatusCode.LLM_SUCCESS)
            elif left < self._total[cluster_id]:  # some layers are there: neither a success nor untried
                self._record(cluster_id, LLMStatusCode.LLM_FAILED)

    def _send_layer(self, layer: int, wanted: list[TransferWithCacheKeyConfig]) -> bool:
        """False: the job ends here."""
        status = self._await_layer(layer)
        if status != LLMStatusCode.LLM_SUCCESS:
            for config in wanted:
                self._record(config.dst_cluster_id, status)
            return False
        for config in wanted:
            status = self._send(config, layer)
            if status != LLMStatusCode.LLM_SUCCESS:
                self._record(config.dst_cluster_id, status)
                return False
            self._left[config.dst_cluster_id] -= 1
        return True

    def _await_layer(self, layer: int) -> LLMStatusCode:
        try:
            ready = self._job.synchronizer.synchronize_layer(layer, None)
        except Exception:  # the caller's code
            logger.exception("layer %d: the layer synchronizer failed", layer)
            return LLMStatusCode.LLM_FAILED
        return LLMStatusCode.LLM_SUCCESS if ready else LLMStatusCode.LLM_PARAM_INVALID

    def _send(self, config: TransferWithCacheKeyConfig, layer: int) -> LLMStatusCode:
        try:
            self._push(self._job.make_request(config, layer))
        except LLMException as error:
            logger.warning("cluster_id=%d layer %d: %s", config.dst_cluster_id, layer, error)
            return error.status_code
        except Exception:  # a defect here must not look like success
            logger.exception("cluster_id=%d layer %d: the push failed", config.dst_cluster_id, layer)
            return LLMStatusCode.LLM_FAILED
        return LLMStatusCode.LLM_SUCCESS
