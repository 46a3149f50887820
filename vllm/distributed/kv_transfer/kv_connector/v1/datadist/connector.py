# SPDX-License-Identifier: Apache-2.0
"""`DataDistConnector`: vLLM's connector contract on one side, `vllm_ascend_pd.engine` on the other. No logic here.

Completions do not go through `get_finished`: every rank answers through the worker metadata, and the scheduler
half counts them (`vllm_ascend_pd.engine.hooks.merge_step_output`), so that a request is reported once, after the
last rank, and a failure is reported per request on both releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from vllm.distributed.kv_transfer.kv_connector.v1.datadist.metadata import (
    DataDistMetadata,
    DataDistRankAddress,
    DataDistWorkerMeta,
)
from vllm_ascend_pd.config import EXTRA_CONFIG_KEY, PDConfig
from vllm_ascend_pd.engine.caches import refuse_nz
from vllm_ascend_pd.engine.prometheus import DataDistPromMetrics, DataDistStats
from vllm_ascend_pd.engine.scheduler import SchedulerHalf, secret_of
from vllm_ascend_pd.engine.staging import settle_transfer
from vllm_ascend_pd.engine.worker import WorkerHalf
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.handshake import find_kv_layout
from vllm_ascend_pd.logs import follow_vllm_logging

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class DataDistConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill/decode over llm_datadist."""

    is_datadist = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        follow_vllm_logging()
        values = self._kv_transfer_config.kv_connector_extra_config.get(EXTRA_CONFIG_KEY)
        if values is None:
            raise PDConfigError(
                "--kv-transfer-config: DataDistConnector is not named by hand; give --pd-role prefill or decode"
            )
        refuse_nz(vllm_config)
        config = PDConfig.from_dict(values)
        self.half: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.half = SchedulerHalf(config, vllm_config, kv_cache_config)
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self.worker = WorkerHalf(
                settle_transfer(config, vllm_config),
                secret_of(config),
                kv_cache_config,
                get_tensor_model_parallel_rank(),
                vllm_config.parallel_config.tensor_parallel_size,
            )

    # ---------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for task in self._get_connector_metadata().tasks:
            self.worker.submit(task)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        self.worker.step_launched()

    def build_connector_worker_meta(self) -> DataDistWorkerMeta | None:
        results, problems, links = self.worker.take_results(), self.worker.take_problems(), self.worker.take_links()
        return DataDistWorkerMeta(results, problems, links) if results or problems or links else None

    def get_handshake_metadata(self) -> DataDistRankAddress | None:
        address = self.worker.address
        if address is None:
            return None
        return DataDistRankAddress(address, self.worker.caches_record, find_kv_layout())

    # ---------------------------------------------------------------- scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.half.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        told = sorted(metadata.values(), key=lambda rank: rank.address.tp_rank)
        self.half.set_ranks(
            tuple(rank.address for rank in told), [rank.caches for rank in told], [rank.kv_layout for rank in told]
        )

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def on_new_request(self, request: Request) -> None:
        self.half.drain()
        if self.half.decode is not None:
            self.half.decode.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.half.decode is None:
            return 0, False
        return self.half.decode.external_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self.half.decode is not None:
            self.half.decode.blocks_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.half.drain()
        if self.half.decode is None:
            return DataDistMetadata()
        return DataDistMetadata(self.half.decode.take_tasks())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.half.prefill is not None:
            return False, self.half.prefill.request_finished(request, block_ids)
        self.half.decode.request_finished(request.request_id)
        return False, None

    def shutdown(self) -> None:
        if self.half is not None:
            self.half.close()
        if self.worker is not None:
            self.worker.close()

    # ---------------------------------------------------------------- metrics

    def get_kv_connector_stats(self) -> DataDistStats | None:
        data = self.half.stats.take() if self.half is not None else None
        return DataDistStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DataDistStats:
        return DataDistStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DataDistPromMetrics:
        return DataDistPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
