# SPDX-License-Identifier: Apache-2.0
"""Versions that must pair: each thing that can be wrong is named with what to do, and a right host is all ok."""

from __future__ import annotations

import dataclasses
import platform
from types import SimpleNamespace

import pytest

from tools.fork.lanes import get_lane
from vllm_ascend_pd.ascend import pairing
from vllm_ascend_pd.ascend.host_facts import ask_chip, collect_facts, read_built_chip, refuse_unpaired_host
from vllm_ascend_pd.ascend.pairing import PairingFacts, check_pairing, get_generation, refuse_unpaired
from vllm_ascend_pd.errors import PDConfigError

RIGHT = PairingFacts(
    has_npu=True,
    python=(3, 11),
    distribution="0.23.0+pd.1.ascend",
    vllm_ascend="0.23.0.post1",
    vllm_ascend_chip="A3",
    torch="2.10.0+cpu",
    torch_npu="2.10.0.post4",
    triton_ascend="3.2.2",
    cann="9.1.0",
    driver="25.5.1.b010",
    chip="A3",
)
BARE = dataclasses.replace(RIGHT, vllm_ascend=None, vllm_ascend_chip=None)


def by_name(facts):
    return {verdict.name: verdict for verdict in check_pairing(facts)}


def test_a_right_host_is_ok_in_every_line():
    verdicts = check_pairing(RIGHT)
    assert {verdict.level for verdict in verdicts} == {"ok"}
    names = ["vllm", "vllm-ascend", "chip", "torch", "torch-npu", "triton-ascend", "CANN", "driver", "python"]
    assert [verdict.name for verdict in verdicts] == names
    refuse_unpaired(verdicts)


@pytest.mark.parametrize(
    ("wrong", "name", "level", "advice"),
    [
        ({"distribution": "0.23.0"}, "vllm", "fail", "vllm-0.23.0+pd.<n>.ascend"),
        ({"distribution": "0.32.0+pd.1.cpu"}, "vllm", "fail", "needs vLLM 0.23.0"),
        ({"distribution": "0.23.0+pd.1.ascend.cpu"}, "vllm", "fail", "install the wheel of lane ascend"),
        ({"distribution": "0.32.0+pd.1.ascend"}, "vllm", "fail", "needs vLLM 0.23.0"),
        ({"distribution": None}, "vllm", "fail", "install the wheel of lane ascend"),
        ({"vllm_version_override": "0.23.1"}, "VLLM_VERSION", "fail", "unset VLLM_VERSION"),
        ({"vllm_ascend": None}, "vllm-ascend", "fail", "vllm-ascend==0.23.0.post1"),
        ({"vllm_ascend": "0.23.0"}, "vllm-ascend", "warn", "checked with 0.23.0.post1 only"),
        ({"vllm_ascend": "0.18.0"}, "vllm-ascend", "fail", "does not go with vLLM 0.23.0"),
        ({"vllm_ascend_chip": None}, "chip", "fail", "SOC_VERSION"),
        ({"vllm_ascend_chip": "A2"}, "chip", "fail", "SOC_VERSION for that chip"),
        ({"chip": None}, "chip", "warn", "npu-smi info"),
        ({"chip": "_310P", "vllm_ascend_chip": "_310P"}, "chip", "fail", "run without --pd-role"),
        ({"torch": "2.11.0"}, "torch", "fail", "torch==2.10.0"),
        ({"torch": None}, "torch", "fail", "torch==2.10.0"),
        ({"torch_npu": None}, "torch-npu", "fail", "--no-deps torch-npu==2.10.0.post4"),
        ({"torch_npu": "2.10.0.post1"}, "torch-npu", "warn", "checked with 2.10.0.post4 only"),
        ({"torch_npu": "2.9.0"}, "torch-npu", "fail", "does not go with torch 2.10.0"),
        ({"triton": "3.6.0"}, "triton-ascend", "warn", "pip uninstall -y triton triton-ascend"),
        ({"triton_ascend": None}, "triton-ascend", "warn", "triton-ascend==3.2.2"),
        ({"triton_ascend": "3.2.0"}, "triton-ascend", "warn", "asks for 3.2.2"),
        ({"cann": None}, "CANN", "fail", "ASCEND_HOME_PATH"),
        ({"cann": "9.1.1"}, "CANN", "warn", "checked with CANN 9.1.0 only"),
        ({"cann": "8.5.1"}, "CANN", "fail", "need CANN 9.1.0"),
        ({"cann": "9.10.0"}, "CANN", "fail", "need CANN 9.1.0"),
        ({"driver": None}, "driver", "warn", "version.info"),
        ({"driver": "24.1.rc3"}, "driver", "warn", "release notes of CANN 9.1.0"),
        ({"python": (3, 13)}, "python", "fail", "3.10 to 3.12"),
        ({"python": (3, 9)}, "python", "fail", "3.10 to 3.12"),
    ],
)
def test_one_wrong_thing_is_named_alone_with_what_to_do(wrong, name, level, advice):
    found = by_name(dataclasses.replace(RIGHT, **wrong))
    assert found[name].level == level
    assert advice in found[name].advice
    rest = {n: v.level for n, v in found.items() if n != name}
    assert set(rest.values()) == {"ok"}
    if level == "fail":
        with pytest.raises(PDConfigError, match=f"\n  {name}: "):
            refuse_unpaired(list(found.values()))
    else:
        refuse_unpaired(list(found.values()))


def test_a_host_without_npu_is_not_asked_for_any():
    plain = PairingFacts(has_npu=False, python=(3, 13), distribution="0.32.0+pd.1.cpu", torch="2.13.0")
    assert [(v.name, v.level) for v in check_pairing(plain)] == [("npu", "ok")]


def test_the_cpu_lane_on_an_npu_host_is_only_a_warning_while_vllm_ascend_is_not_there():
    cpu = dataclasses.replace(BARE, distribution="0.32.0+pd.1.cpu", torch="2.13.0", torch_npu=None, cann=None)
    assert [(v.name, v.level) for v in check_pairing(cpu)] == [("vllm", "warn")]
    assert "computes on the CPU" in check_pairing(cpu)[0].advice
    both = dataclasses.replace(cpu, vllm_ascend="0.23.0.post1")
    assert by_name(both)["vllm"].level == "fail"


def test_a_hidden_npu_does_not_excuse_an_installed_vllm_ascend():
    hidden = dataclasses.replace(RIGHT, has_npu=False, torch="2.9.0")
    assert by_name(hidden)["torch"].level == "fail"


def test_the_pair_is_what_the_lane_is_pinned_to():
    lane = get_lane(pairing.LANE)
    assert (lane.release, lane.torch) == (pairing.VLLM, pairing.TORCH)
    assert pairing.VLLM_ASCEND in lane.pairs_with


@pytest.mark.parametrize(
    ("chip", "npu", "generation"),
    [
        ("910B3", "", "A2"),
        ("910B2C", "", "A2"),
        ("A2G3", "", "A2"),
        ("Ascend910", "9391", "A3"),
        ("Ascend910_9382", "", "A3"),
        ("310P3", "", "_310P"),
        ("Ascend950DT", "9582", "A5"),
        ("910ProB", "", None),
        ("Ascend910", "", None),
    ],
)
def test_chip_names_lead_to_the_family(chip, npu, generation):
    assert get_generation(chip, npu) == generation


def test_facts_are_read_from_files_and_tools_without_importing_anything(tmp_path):
    files = {
        "dev/davinci_manager": "",
        "usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
        "opt/cann/version.cfg": "# versions\nruntime_running_version=[7.6.0.1:9.0.0]\n"
        "toolkit_running_version=[7.9.0.1.220:9.1.0]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    told = {
        "npu-smi info -l": "\tTotal Count : 8\n\n\tNPU ID        : 2\n\tChip Count    : 2\n",
        "npu-smi info -t board -i 2": "\tNPU ID        : 2\n\tSoftware Version : 25.5.0\n",
        "npu-smi info -t board -i 2 -c 0": "\tChip Name : Ascend910\n\tNPU Name : 9391\n",
    }
    facts = collect_facts(
        root=tmp_path,
        environ={"ASCEND_HOME_PATH": str(tmp_path / "opt/cann"), "VLLM_VERSION": ""},
        installed={"vllm": "0.23.0+pd.1.ascend", "torch": "2.10.0"}.get,
        run=lambda command: told.get(" ".join(command), ""),
    )
    assert (facts.has_npu, facts.driver, facts.cann, facts.chip) == (True, "25.5.0", "9.1.0", "A3")
    assert (facts.distribution, facts.torch, facts.vllm_ascend) == ("0.23.0+pd.1.ascend", "2.10.0", None)
    assert facts.vllm_version_override is None


def test_cann_is_found_by_its_install_record_and_else_by_its_folder(tmp_path):
    latest = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    real = tmp_path / "usr/local/Ascend/ascend-toolkit/8.5.RC1"
    real.mkdir(parents=True)
    latest.symlink_to(real)
    nothing = {"root": tmp_path, "environ": {}, "installed": lambda _: None, "run": lambda _: ""}
    assert collect_facts(**nothing).cann == "8.5.RC1"
    (real / f"{platform.machine()}-linux").mkdir()
    (real / f"{platform.machine()}-linux/ascend_toolkit_install.info").write_text("package_name=x\nversion=9.1.0\n")
    assert collect_facts(**nothing).cann == "9.1.0"
    assert collect_facts(**{**nothing, "root": tmp_path / "empty"}).cann is None


def test_the_chip_of_the_installed_vllm_ascend_is_read_from_its_build_record(tmp_path):
    assert read_built_chip([str(tmp_path)]) is None
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend/_build_info.py").write_text("# Auto-generated file\n__device_type__ = '_310P'\n")
    assert read_built_chip(["", str(tmp_path)]) == "_310P"


def test_a_missing_npu_smi_leaves_the_chip_unknown():
    assert ask_chip(lambda _: "") is None


def test_a_start_on_a_host_with_npus_is_refused_until_versions_pair(tmp_path, caplog):
    refuse_unpaired_host(tmp_path)  # no device file, nothing is asked
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci_manager").touch()
    installed = {"vllm": "0.32.0+pd.1.cpu", "torch": "2.13.0"}
    sources = {"environ": {}, "run": lambda _: "", "installed": installed.get}
    refuse_unpaired_host(tmp_path, **sources)  # the lane for CPUs computes on the CPU: a warning
    assert "it computes on the CPU" in caplog.text
    installed["vllm-ascend"] = "0.23.0.post1"
    with pytest.raises(PDConfigError, match="do not belong together:\n  vllm: 0.32.0"):
        refuse_unpaired_host(tmp_path, **sources)


def test_the_start_asks_for_the_pair_and_refuses_settings_of_vllm_ascend_by_name(monkeypatch, capsys):
    from vllm_ascend_pd.front import resolve, serve_args

    args = SimpleNamespace(pd_role="prefill", host=None, additional_config={"enable_kv_nz": True})
    with pytest.raises(SystemExit):
        serve_args.check_serve_args(args)
    assert "--additional-config enable_kv_nz=true does not go with --pd-role prefill" in capsys.readouterr().err
    with pytest.raises(PDConfigError, match="enable_kv_nz=true"):
        resolve.refuse_typed("decode", args, {})

    def refuse():
        raise PDConfigError("the versions")

    monkeypatch.setattr("vllm_ascend_pd.ascend.host_facts.refuse_unpaired_host", refuse)
    with pytest.raises(SystemExit):
        serve_args.check_serve_args(SimpleNamespace(pd_role="prefill", host=None))
    assert "error: the versions" in capsys.readouterr().err
