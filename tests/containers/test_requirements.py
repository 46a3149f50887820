# SPDX-License-Identifier: Apache-2.0
"""What goes into the image's layer of dependencies."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.containers import requirements

METADATA = """Metadata-Version: 2.4
Name: vllm
Requires-Dist: torch==2.13.0
Requires-Dist: numba==0.65.0; platform_machine == "x86_64"
Requires-Dist: torch-npu==2.10.0.post4; extra == "ascend"
Requires-Dist: six; (python_version > "3.11") and extra == 'ascend'
Requires-Dist: pandas; extra == "bench"

Requires-Dist: not-a-header
"""


@pytest.mark.parametrize(
    ("extra", "added"), [("", []), ("ascend", ["torch-npu==2.10.0.post4", 'six; (python_version > "3.11")'])]
)
def test_the_lines_without_an_extra_and_those_of_the_one_asked_for(extra: str, added: list[str]):
    found = list(requirements.iter_requirements(METADATA, extra))
    assert found == ["torch==2.13.0", 'numba==0.65.0; platform_machine == "x86_64"', *added]


def test_it_prints_them_sorted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm-1.dist-info/METADATA", METADATA)
        archive.writestr("vllm/a.py", "")
    assert requirements.main([str(wheel)]) == 0
    assert capsys.readouterr().out.splitlines() == ['numba==0.65.0; platform_machine == "x86_64"', "torch==2.13.0"]
