# SPDX-License-Identifier: Apache-2.0
"""Edits to the API server's start: a decode instance waits for its first prefill instance before it serves.

Why here      After the engine core is up (it does the handshake) and before the HTTP server answers /health.
What it does  `start_api_server` waits, logs its progress, and ends the process with the reason when it cannot start.
Kind          needed to plug in        Forwarded  no
Drop when     Upstream has an asynchronous start-up hook with the engine client at hand.
"""

from tools.fork import AddImport, Assignment, InsertBefore

UPSTREAM = ("vllm/entrypoints/launchers/api_server/entry.py", "vllm/entrypoints/openai/api_server.py")

EDITS = (
    AddImport("from vllm_ascend_pd.front import hooks as pd_start_hooks"),
    InsertBefore(
        "await pd_start_hooks.start_api_server(engine_client)",
        scope="build_and_serve",
        anchor=Assignment("app", callee="build_app"),
    ),
)
