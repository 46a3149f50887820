# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/entrypoints/cli/main.py`: the subcommand `vllm pd`.

Why here      The list of subcommand modules is local to `main()`; no plug-in point adds to it. And `main()`
              imports every subcommand with its dependencies first (20 s on two cores), which `vllm pd status`
              does not need.
What it does  `vllm pd …` runs at once; `vllm --help` lists it.
Kind          plug-in point missing upstream        Forwarded  no
Drop when     Upstream lets a distribution register a subcommand.
"""

from tools.fork import Assignment, InsertAfter, InsertFirst

UPSTREAM = ("vllm/entrypoints/cli/main.py",)

EDITS = (
    InsertFirst(
        "from vllm_ascend_pd.up.cli import run_pd_command\nrun_pd_command(sys.argv)",
        scope="main",
    ),
    InsertAfter(
        "import vllm.entrypoints.cli.pd\nCMD_MODULES.append(vllm.entrypoints.cli.pd)",
        scope="main",
        anchor=Assignment("CMD_MODULES"),
    ),
)
