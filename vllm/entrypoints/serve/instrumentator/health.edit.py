# SPDX-License-Identifier: Apache-2.0
"""Edits to `/health`: it covers PD.

Why here      Upstream's check sees only whether the engine core process has died.
What it does  A supervised PD thread that is dead or stuck, or (strict decode) no reachable prefill instance, makes
              `/health` answer 503 with one sentence each. Asked of a thread that never waits behind a step.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream lets a connector take part in /health.
"""

from tools.fork import AddImport, InsertFirst

UPSTREAM = ("vllm/entrypoints/serve/instrumentator/health.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.front import hooks as pd_hooks"),
    InsertFirst(
        "if (pd_problem := await pd_hooks.get_health_problem(raw_request)) is not None:\n    return pd_problem",
        scope="health",
    ),
)
