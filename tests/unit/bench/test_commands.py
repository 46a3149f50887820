# SPDX-License-Identifier: Apache-2.0
"""The commands from the outside: tiny runs with their files, and refusals that name the flag."""

from __future__ import annotations

import importlib.util
import json

import pytest

from vllm_ascend_pd.bench.arguments import parse_size, parse_sizes
from vllm_ascend_pd.bench.cli import main
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.up import cli as pd_cli

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
TRANSFER = ["transfer", "--payload-mib", "1", "--pool-mib", "4", "--pieces", "16K", "--rounds", "1"]
TRANSFER += ["--contenders", "copy-limit,raw-tcp"]
STAGES = [
    "stages",
    "--max-memory",
    "48M",
    "--shapes",
    "qwen2.5-0.5b",
    "--lengths",
    "32",
    "--rounds",
    "1",
    "--threads",
    "1",
]
STAGES_RATIOS = [f"{ours}_vs_per_layer_{case}" for ours in ("staged", "straight") for case in ("1_block", "64_mib")]


def run_with_files(arguments, folder, run=main):
    json_path, plot_path = folder / "out.json", folder / "out.png"
    arguments = [*arguments, "--json", str(json_path)]
    if HAS_MATPLOTLIB:
        arguments += ["--plot", str(plot_path)]
    assert run(arguments) == 0
    if HAS_MATPLOTLIB:
        assert plot_path.read_bytes().startswith(b"\x89PNG")
        assert plot_path.stat().st_size > 5000
    return json.loads(json_path.read_text())


def test_transfer_prints_a_table_and_writes_json_and_chart(tmp_path, capsys):
    document = run_with_files(TRANSFER, tmp_path, run=lambda words: pd_cli.main(["bench", *words]))
    assert "copy limit" in capsys.readouterr().out
    assert document["gb_per_s"]["copy-limit"]["16384"] > 0
    assert document["ratios"]["pull_mapped_vs_copy_limit"] == {}
    assert document["machine"]["cpus"] >= 1
    assert "--rounds" in document["command"]
    assert {sample["phase"] for sample in document["samples"]} == {"tune", "round"}


def test_stages_prints_tables_and_writes_json_and_chart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vllm_ascend_pd.bench.stages.run.LARGE_BYTES", 16 << 20)  # 64 MiB take long here
    document = run_with_files(STAGES, tmp_path)
    out = capsys.readouterr().out
    assert "staged_vs_per_layer_1_block" in out
    for name in STAGES_RATIOS:
        assert set(document["ratios"][name]) == {"qwen2.5-0.5b"}
        assert document["ratios"][name]["qwen2.5-0.5b"] > 0
    assert document["ratios"]["staged_vs_ideal"]["qwen2.5-0.5b"] > 0
    chart = document["chart_seconds"]["qwen2.5-0.5b"]["32"]
    assert chart["per-layer"]["scatter"] > 0
    assert chart["fused"]["scatter"] == 0
    passes = {case["name"]: case["num_passes"] for case in document["cases"]}
    assert passes["1_block"] == 1
    assert passes["64_mib"] > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*TRANSFER, "--contenders", "nixxl"], "did you mean 'nixl'"),
        ([*TRANSFER, "--rounds", "0"], "--rounds"),
        ([*TRANSFER, "--pieces", "7"], "--pieces"),
        ([*TRANSFER, "--pool-mib", "999999999"], "--pool-mib"),
        ([*TRANSFER, "--peers-python", "/nonexistent"], "--peers-python"),
        ([*TRANSFER, "--host-option", "x=1"], "--host-option"),
        ([*TRANSFER, "--json", "/nonexistent/x.json"], "--json"),
        ([*TRANSFER, "--plot", "x.txt"], "--plot"),
        ([*STAGES, "--shapes", "llama-3-8"], "did you mean 'llama-3-8b'"),
        ([*STAGES, "--max-memory", "9999G"], "--max-memory"),
        ([*STAGES, "--max-memory", "1K"], "--max-memory"),
        ([*STAGES, "--block-size", "0"], "--block-size"),
    ],
)
def test_wrong_arguments_are_refused_by_flag_before_anything_runs(arguments, words, capsys):
    assert main(arguments) == 1
    assert words in capsys.readouterr().err


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*TRANSFER, "--plot", "x.png"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_sizes_are_powers_of_two_units():
    assert parse_sizes("--pieces", "2M,4K,4096") == [4096, 2 << 20]
    assert parse_size("--pieces", "2KiB") == 2048
    with pytest.raises(PDConfigError, match="--pieces: '4X'"):
        parse_size("--pieces", "4X")
