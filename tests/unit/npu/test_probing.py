# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen from what lies where, and what is said about the rest."""

from __future__ import annotations

import json

import pytest

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu import probing
from vllm_ascend_pd.npu.probing import Backend


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host that has the packages in `host.packages`; files go into `host.folder`."""

    class Host:
        packages = {"torch_npu"}
        folder = tmp_path

        def add_extension(self):
            (tmp_path / f"{probing.MODULE}.so").touch()
            monkeypatch.setenv(probing.EXTENSION_VARIABLE, str(tmp_path))

        def add_kernel(self, **changes):
            (tmp_path / "pd_kv.o").touch()
            kernels = {role: {"file": "pd_kv.o", "name": f"pd_kv_{role}"} for role in ("extract", "inject")}
            description = tmp_path / "pd_kv.json"
            description.write_text(json.dumps({"abi": 1, "grid": 48, "kernels": kernels, **changes}))
            monkeypatch.setenv(probing.KERNEL_VARIABLE, str(description))

    made = Host()
    monkeypatch.setattr(probing, "has_package", lambda name: name in made.packages)
    monkeypatch.setenv(probing.EXTENSION_VARIABLE, str(tmp_path))
    monkeypatch.setenv(probing.KERNEL_VARIABLE, "")
    monkeypatch.delenv(probing.BACKEND_VARIABLE, raising=False)
    probing.probe.cache_clear()
    yield made
    probing.probe.cache_clear()


def test_without_torch_npu_it_is_torch(host):
    host.packages = set()
    host.add_extension()
    host.add_kernel()
    assert probing.probe() == probing.Found(Backend.TORCH, ("torch_npu is not installed",))


def test_extension_and_kernel_are_best(host):
    host.add_extension()
    host.add_kernel()
    found = probing.probe()
    assert found.backend is Backend.EXTENSION_KERNEL
    assert found.kernel is not None
    file = str(host.folder / "pd_kv.o")
    assert found.kernel.entries == ((file, "pd_kv_extract"), (file, "pd_kv_inject"), ("", ""), ("", ""))
    assert found.kernel.grid == 48


def test_extension_without_a_kernel_copies(host):
    host.add_extension()
    found = probing.probe()
    assert (found.backend, found.kernel) == (Backend.EXTENSION_MEMCPY, None)
    assert probing.KERNEL_VARIABLE in found.reasons[0]


def test_triton_needs_its_ascend_backend(host):
    host.packages = {"torch_npu", "triton"}
    assert probing.probe().backend is Backend.TORCH
    probing.probe.cache_clear()
    host.packages = {"torch_npu", "triton", "triton.backends.ascend"}
    assert probing.probe().backend is Backend.TRITON


def test_forcing_what_is_not_there_says_why(host, monkeypatch):
    monkeypatch.setenv(probing.BACKEND_VARIABLE, "extension+memcpy")
    with pytest.raises(PDConfigError, match=r"extension\+memcpy is not there: the extension _pd_npu is neither"):
        probing.probe()
    monkeypatch.setenv(probing.BACKEND_VARIABLE, "fast")
    with pytest.raises(PDConfigError, match="want one of extension"):
        probing.probe()


def test_forcing_something_worse_is_obeyed(host, monkeypatch):
    host.add_extension()
    host.add_kernel()
    monkeypatch.setenv(probing.BACKEND_VARIABLE, "extension+memcpy")
    found = probing.probe()
    assert (found.backend, found.kernel) == (Backend.EXTENSION_MEMCPY, None)
    assert found.extension is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"abi": 2}, "has abi 2, this version wants 1"),
        ({"kernels": {}}, "no kernel for extract"),
        ({"grid": "many"}, "does not describe kernels"),
        ({"kernels": {"extract": {"file": "gone.o", "name": "x"}}}, "gone.o for extract, which does not exist"),
    ],
)
def test_a_wrong_description_of_kernels_is_refused(host, changes, words):
    host.add_extension()
    host.add_kernel(**changes)
    with pytest.raises(PDConfigError, match=words):
        probing.probe()
