# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/v1/core/sched/scheduler.py`: the ranks' answers, and one more token of each sliding window.

Why here      A connector sees the step's output too late to name failed loads, and on 0.23.0 cannot name them per
              request at all. The blocks of a finished prompt are trimmed for the token after the last one, before
              the connector is asked.
What it does  Before the output is used, what our ranks answered is put into it, counted over all ranks. For requests
              that will be handed over, the trim keeps the window of the last prompt token.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream counts ranks and reports failed receives per request on all our lanes, and trims by the
              tokens that the reader has.
"""

from tools.fork import AddImport, Assignment, Call, InsertAfter, ReplaceCallee

UPSTREAM = ("vllm/v1/core/sched/scheduler.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.engine import hooks as pd_hooks"),
    InsertAfter(
        "kv_connector_output = pd_hooks.merge_step_output(self, kv_connector_output)",
        scope="Scheduler.update_from_output",
        anchor=Assignment("kv_connector_output"),
    ),
    ReplaceCallee(
        "pd_hooks.skipped_block_remover(self, request)",
        scope="Scheduler._connector_finished",
        anchor=Call("self.kv_cache_manager.remove_skipped_blocks"),
    ),
)
