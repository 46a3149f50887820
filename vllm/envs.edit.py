# SPDX-License-Identifier: Apache-2.0
"""Edits to `vllm/envs.py`: our variables are known ones.

Why here      Upstream warns of every `VLLM_*` variable that is not in this table, and
              `--fail-on-environ-validation` refuses to start.
What it does  Adds the names of the `VLLM_PD_…` twins. Their values are read by `front/flags.py` alone.
Kind          needed to plug in        Forwarded  no
Drop when     Upstream lets a plug-in register variables.
"""

from tools.fork import AddImport, Append

UPSTREAM = ("vllm/envs.py",)

EDITS = (
    AddImport("from vllm_ascend_pd.front.flags import pd_environment"),
    Append("environment_variables.update(pd_environment())"),
)
