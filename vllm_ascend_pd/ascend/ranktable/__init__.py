# SPDX-License-Identifier: Apache-2.0
"""Rank tables: one model, three formats. Normally nobody needs the file: see docs/ranktable.md.

Reading order: `model`, `build` (devices to table), `write`, `read` (with `lines`), `check`, `cli`.
"""

from vllm_ascend_pd.ascend.ranktable.build import from_devices, groups_table, roles_table
from vllm_ascend_pd.ascend.ranktable.model import Problem, RankTable, RankTableError
from vllm_ascend_pd.ascend.ranktable.read import read_table, scan_table
from vllm_ascend_pd.ascend.ranktable.write import write_table

__all__ = [
    "Problem",
    "RankTable",
    "RankTableError",
    "from_devices",
    "groups_table",
    "read_table",
    "roles_table",
    "scan_table",
    "write_table",
]
