# SPDX-License-Identifier: Apache-2.0
"""Edits to the module that builds the HTTP app: the `/pd/*` endpoints.

Why here      Upstream's endpoint plug-ins exist in 0.32.0 only and need an installed entry point.
What it does  Adds a router. Without `--pd-role` its endpoints answer 404.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Both lanes have endpoint plug-ins that a distribution can register by itself.
"""

from tools.fork import AddImport, Assignment, InsertAfter

UPSTREAM = ("vllm/entrypoints/launchers/app.py", "vllm/entrypoints/openai/api_server.py")

EDITS = (
    AddImport("from vllm_ascend_pd.front import hooks as pd_hooks"),
    InsertAfter("pd_hooks.attach_routes(app)", scope="build_app", anchor=Assignment("app.root_path")),
)
