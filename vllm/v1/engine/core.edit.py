# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/v1/engine/core.py`: the connector can wake an idle engine core, and is asked when it wakes.

Why here      Leases end while the engine sleeps in its input queue; their blocks may only be freed on its thread.
              Upstream's way (the connector says that work is pending) makes an idle engine loop every millisecond.
What it does  Hands the connector a function that posts upstream's own WAKEUP message, and calls the connector
              whenever a message is taken from the queue. While all requests wait for a handoff, the engine sleeps
              in that queue instead of stepping. An orderly shutdown lets readers of leased blocks finish.
              Between profiling and sizing, an NPU's memory for staging and links is taken off what KV caches may use.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream gives connectors a way to run on the engine thread while it idles.
"""

from tools.fork import AddImport, Assignment, InsertAfter, InsertBefore, InsertFirst, Return

UPSTREAM = ("vllm/v1/engine/core.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.engine import hooks as pd_hooks"),
    InsertBefore(
        "pd_hooks.attach_engine_core(self)",
        scope="EngineCoreProc.__init__",
        anchor=Assignment("ready_event"),
    ),
    InsertAfter(
        "available_gpu_memory = pd_hooks.keep_device_bytes(vllm_config, available_gpu_memory)",
        scope="EngineCore._initialize_kv_caches",
        anchor=Assignment("available_gpu_memory", callee="determine_available_memory"),
    ),
    InsertFirst("pd_hooks.drain_engine_core(self)", scope="EngineCoreProc._handle_client_request"),
    InsertBefore(
        "pd_hooks.rest_engine_core(self, model_executed)",
        scope="EngineCoreProc._process_engine_step",
        anchor=Return(),
    ),
    InsertFirst("pd_hooks.hold_until_leases_end(self)", scope="EngineCore.shutdown"),
)
