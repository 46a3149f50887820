# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/v1/engine/async_llm.py`: every request passes the front door once, with its internal id.

Why here      The engine client is the last place that sees the parent request (n > 1 is split right after) and the
              first that knows the internal id, which the engine core, the ask and the abort must share.
What it does  `wrap_request` marks the request for remote KV and starts the ask beside it; an abort and the shutdown
              tell the front door. Requests with streamed input are computed here, and counted.
Kind          needed to plug in        Forwarded  no
Drop when     Upstream has a request hook in its engine client.
"""

from tools.fork import AddImport, Assignment, Call, InsertAfter, InsertFirst

UPSTREAM = ("vllm/v1/engine/async_llm.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.front import hooks as pd_hooks"),
    InsertAfter(
        "pd_hooks.wrap_request(self, request)",
        scope="AsyncLLM.add_request",
        anchor=Call("assign_request_id"),
    ),
    InsertFirst("pd_hooks.count_streaming_session(self)", scope="AsyncLLM._add_streaming_input_request"),
    InsertAfter(
        "pd_hooks.forget_requests(self, all_request_ids)",
        scope="AsyncLLM.abort",
        anchor=Assignment("all_request_ids"),
    ),
    InsertFirst("pd_hooks.close_engine(self)", scope="AsyncLLM.shutdown"),
)
