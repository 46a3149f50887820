# SPDX-License-Identifier: Apache-2.0
"""The functions that the edits in `vllm/` call: each does nothing unless this engine has a PD role.

Imports no vLLM at import time (the edited modules import this one).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

WAITING_STATUS = "WAITING_FOR_REMOTE_KVS"


def pd_connector(connector: Any) -> Any | None:
    """Our connector, itself or inside a MultiConnector; None when there is none."""
    for candidate in (connector, *(getattr(connector, "_connectors", None) or ())):
        if getattr(candidate, "is_datadist", False):
            return candidate
    return None


# ------------------------------------------------------------------ EngineCoreProc


def attach_engine_core(core: Any) -> None:
    """Give the scheduler half a way to wake this engine core's thread when it idles in its input queue."""
    connector = pd_connector(core.scheduler.get_kv_connector())
    if connector is None:
        return
    from vllm.v1.engine import EngineCoreRequestType

    connector.half.set_wake(lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
    connector.half.count_requests = core.scheduler.get_num_unfinished_requests


def drain_engine_core(core: Any) -> None:
    """On the engine thread, for every message from outside, wake-ups included."""
    connector = pd_connector(core.scheduler.get_kv_connector())
    if connector is not None:
        connector.half.drain()


def rest_engine_core(core: Any, model_executed: bool) -> None:
    """After a step: sleep in the input queue while every request waits for its handoff, and nothing else is to do.

    Upstream steps every millisecond then, and each worker rank spins on its message queue for a second after a step.
    A handoff, a refusal, a new request, an abort and a shutdown all come as messages.
    """
    scheduler = core.scheduler
    connector = scheduler.get_kv_connector()
    if model_executed or not getattr(connector, "is_datadist", False) or connector.half.decode is None:
        return
    if core.batch_queue or scheduler.finished_req_ids or getattr(scheduler, "ec_connector", None) is not None:
        return
    if hasattr(core, "dp_group") or not core.process_input_queue_block:
        return  # its peers wait for its steps
    if not core.is_running() or not core.has_work():
        return  # a shutdown or a pause began meanwhile: its message may be gone already
    if rest_s := connector.half.decode.rest_s(len(scheduler.requests)):
        try:
            message = core.input_queue.get(timeout=rest_s)
        except queue.Empty:
            return
        core._handle_client_request(*message)


def hold_until_leases_end(core: Any) -> None:
    """At an orderly shutdown, before the workers go: decode instances may still be reading."""
    if getattr(core, "shutdown_state", None) is None or core.shutdown_state.name == "RUNNING":
        return  # in process, or after an error
    connector = pd_connector(core.scheduler.get_kv_connector())
    if connector is not None:
        connector.half.hold_leases()


# ------------------------------------------------------------------ Scheduler


def merge_step_output(scheduler: Any, output: Any) -> Any:
    """Put what our ranks answered into the step's KVConnectorOutput, once per request, all ranks counted.

    Failed loads are named per request (never as block ids, which hybrid models cannot take).
    """
    connector = pd_connector(scheduler.connector)
    if connector is None:
        return output
    half = connector.half
    parts = list(_worker_metas(output))
    half.note_workers(parts)
    finished = []
    if half.decode is not None:
        finished = half.decode.step_ended([result for part in parts for result in part.rank_results])
    stats = _stats_for_0230(scheduler, half, output)
    finished = [item for item in finished if _waits_for_word(scheduler, item.request_id)]
    if not finished and stats is None:
        return output
    from vllm.v1.outputs import KVConnectorOutput

    output = output if output is not None else KVConnectorOutput()
    output.kv_connector_stats = output.kv_connector_stats or stats
    output.finished_recving = set(output.finished_recving or ())
    for item in finished:
        output.finished_recving.add(item.request_id)
        if not item.ok and not item.aborted:
            _fail_load(scheduler, output, item.request_id)
    return output


def _stats_for_0230(scheduler: Any, half: Any, output: Any) -> Any | None:
    """Our counts, where upstream does not ask for them: 0.23.0 does only when a worker had some.

    Its in-process client drops the statistics of a step that answers nobody, so they wait for one that does.
    """
    if hasattr(scheduler, "_handle_failed_recving") or getattr(output, "kv_connector_stats", None):
        return None
    if half.is_in_process and not any(r.num_computed_tokens >= r.num_tokens for r in scheduler.running):
        return None
    return scheduler.connector.get_kv_connector_stats()


def _waits_for_word(scheduler: Any, request_id: str) -> bool:
    """Upstream asserts this for every request that is named as received."""
    request = scheduler.requests.get(request_id)
    return request is not None and (request.status.name == WAITING_STATUS or request.is_finished())


def _worker_metas(output: Any) -> Iterator[Any]:
    meta = getattr(output, "kv_connector_worker_meta", None)
    for part in (meta, *(getattr(meta, "metadata", None) or ())):
        if hasattr(part, "rank_results"):
            yield part


def _fail_load(scheduler: Any, output: Any, request_id: str) -> None:
    if hasattr(output, "failed_recving"):  # 0.32.0
        output.failed_recving.add(request_id)
        return
    request = scheduler.requests[request_id]  # 0.23.0 has only the flag that its own block errors set
    if request.status.name == WAITING_STATUS:  # else it was aborted meanwhile, and nobody would take the flag back
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)


def skipped_block_remover(scheduler: Any, request: Any) -> Callable[..., Any]:
    """`remove_skipped_blocks` for a finished request; for a handoff it keeps one more token of each window.

    The decode side computes the last prompt token itself, so its window starts one token earlier than that of
    the token after it, for which upstream trims.
    """
    remove: Callable[..., Any] = scheduler.kv_cache_manager.remove_skipped_blocks
    if not (request.kv_transfer_params or {}).get("do_remote_decode"):
        return remove

    def remove_but_keep_one(request_id: str, **counts: int) -> Any:
        names = ("processed_computed_tokens", "total_computed_tokens")  # 0.32.0, 0.23.0
        kept = {k: max(0, v - 1) if k in names else v for k, v in counts.items()}
        return remove(request_id=request_id, **kept)

    return remove_but_keep_one


# ------------------------------------------------------------------ KV cache memory


def round_num_blocks(vllm_config: Any, kv_cache_groups: Any, num_blocks: int) -> int:
    """Fewer blocks, so that every layer of a shared backing starts on a 2 MiB boundary (0.32.0, layers outermost).

    Raises:
        PDConfigError: so little memory that no block would be left.
    """
    from vllm_ascend_pd.engine.kv_memory import aligned_num_blocks

    return aligned_num_blocks(vllm_config, kv_cache_groups, num_blocks)


def keep_device_bytes(vllm_config: Any, available: Any) -> Any:
    """Less memory for KV caches on an NPU: staging and links take some.

    Raises:
        PDConfigError: so little memory that nothing would be left.
    """
    from vllm_ascend_pd.engine.kv_memory import keep_device_bytes as keep

    return keep(vllm_config, available)


def kv_zeros(kv_cache_config: Any) -> Callable[..., Any]:
    """What replaces `torch.zeros` where KV caches are allocated: memory of this rank's arena when PD is on."""
    from vllm_ascend_pd.engine.kv_memory import allocator

    return allocator(kv_cache_config)
