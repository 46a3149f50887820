# SPDX-License-Identifier: Apache-2.0
"""docs/doctor.md names every check that the code has, and no other."""

from __future__ import annotations

import re

from tests.unit.doctor.doctor_process import ROOT
from vllm_ascend_pd.ascend import pairing

GROUPS = "software|npu|memory|network|secret|container|peer|transfer"


def keys_in_code() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "vllm_ascend_pd/doctor").rglob("*.py"):
        found |= set(re.findall(rf'"((?:{GROUPS})\.[a-z-]+)"', path.read_text()))
    names = set(re.findall(r'Verdict\(\s*"([\w-]+)"|name, [^\n]*= "([\w-]+)"|name = "([\w-]+)"', _pairing_source()))
    return found | {f"software.{name.lower().replace('_', '-')}" for group in names for name in group if name}


def _pairing_source() -> str:
    return (ROOT / "vllm_ascend_pd/ascend/pairing.py").read_text()


def keys_in_docs() -> set[str]:
    found: set[str] = set()
    for line in (ROOT / "docs/doctor.md").read_text().splitlines():
        if not line.startswith("| `"):
            continue
        group = ""
        for name in re.findall(r"`([a-z]*\.[a-z-]+)`", line.split("|")[1]):
            group = name.partition(".")[0] or group
            found.add(f"{group}.{name.partition('.')[2]}")
        found |= set(re.findall(r"\(`(software\.pairing)`", line))
    return found


def test_the_page_and_the_code_name_the_same_checks():
    assert pairing.check_pairing  # the names of its verdicts become keys
    docs, code = keys_in_docs() | {"software.pairing", "software.npu"}, keys_in_code() | {"software.npu"}
    assert docs - code == set()
    assert code - docs == set()
