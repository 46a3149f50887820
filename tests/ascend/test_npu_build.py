# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ascend_pd.npu.build`: what it compiles with what, and what it says where something is missing.

A stand-in for the compiler notes its arguments; `tools.npu` compiles the same sources for real.
"""

from __future__ import annotations

import sys

import pytest

from tools.fork.delta import NPU_PLACE, npu_sources
from vllm_ascend_pd.npu import build
from vllm_ascend_pd.npu.probing import EXTENSION_VARIABLE, find_extension

COMPILER = """#!/bin/sh
echo "$@" > "$0.arguments"
while [ $# -gt 0 ]; do [ "$1" = -o ] && printf library > "$2"; shift; done
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    for name in ("torch", "torch_npu"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise ImportError('CANN is not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("torch", "torch_npu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "site"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    path = tmp_path / "g++"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_the_extension_lands_where_probing_finds_it(packages, compiler, tmp_path, capsys, monkeypatch):
    assert build.main(["--out", str(tmp_path / "out")]) == 0
    monkeypatch.setenv(EXTENSION_VARIABLE, str(tmp_path / "out"))
    assert str(find_extension()) == capsys.readouterr().out.strip()
    assert [p.name for p in (tmp_path / "out").iterdir()] == [find_extension().name]
    arguments = (tmp_path / "g++.arguments").read_text()
    for expected in ("npu/module.cpp", "npu/queue.cpp", "src/copy_plan.cpp", "-std=c++20", "-ltorch_npu"):
        assert expected in arguments
    assert f"-isystem {packages}/torch_npu/include/third_party/acl/inc" in arguments
    assert "triton" not in arguments


def test_every_file_that_it_compiles_is_in_the_wheel(packages, tmp_path):
    command = build.compose_command(build.find_sources(), tmp_path, tmp_path, tmp_path / "x.so", cxx="g++")
    compiled = {word.partition("csrc_npu/")[2] for word in command if word.endswith(".cpp")}
    assert len(compiled) > 4
    assert {f"{NPU_PLACE}/{name}" for name in compiled} <= set(npu_sources())


@pytest.mark.parametrize("missing", ["torch", "torch_npu"])
def test_a_missing_package_is_named(packages, compiler, tmp_path, missing, capsys, monkeypatch):
    spec = build.importlib.util.find_spec
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None if name == missing else spec(name))
    assert build.main(["--out", str(tmp_path / "out")]) == 1
    assert f"error: {missing} is not installed" in capsys.readouterr().err


def test_no_compiler_says_what_to_install(packages, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert build.main(["--out", str(tmp_path / "out")]) == 1
    assert "apt-get install g++, or dnf install gcc-c++" in capsys.readouterr().err


def test_a_failing_compiler_leaves_the_old_extension_and_shows_its_words(packages, compiler, tmp_path, capsys):
    assert build.main(["--out", str(tmp_path / "out")]) == 0
    built = next((tmp_path / "out").iterdir())
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    assert build.main(["--out", str(tmp_path / "out")]) == 1
    assert "no such header" in capsys.readouterr().err
    assert built.read_text() == "library"
