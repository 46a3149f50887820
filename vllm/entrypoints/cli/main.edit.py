# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/entrypoints/cli/main.py`: the subcommand `vllm pd`.

Why here      The list of subcommand modules is local to `main()`; no plug-in point adds to it.
What it does  `vllm pd …` exists; our module is imported only when the CLI runs, as upstream's are.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream lets a distribution register a subcommand.
"""

from tools.fork import Assignment, InsertAfter

UPSTREAM = ("vllm/entrypoints/cli/main.py",)

EDITS = (
    InsertAfter(
        "import vllm.entrypoints.cli.pd\nCMD_MODULES.append(vllm.entrypoints.cli.pd)",
        scope="main",
        anchor=Assignment("CMD_MODULES"),
    ),
)
