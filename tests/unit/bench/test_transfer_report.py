# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios, table and JSON of `bench transfer` from recorded samples."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tests.unit.bench.fakes import MIB, make_plan, make_result
from vllm_ascend_pd.bench.transfer.report import build_document, print_document

RATIO_NAMES = [
    "pull_mapped_vs_copy_limit",
    "pull_mapped_vs_nixl",
    "pull_mapped_vs_mooncake",
    "pull_tcp_vs_raw",
    "pull_tcp_vs_nixl_tcp",
]
MS = 1e-3
SECONDS = {
    "copy-limit": {4096: [1 * MS, 9 * MS, 2 * MS], 65536: [1 * MS, 1 * MS, 1 * MS]},
    "ours-mapped": {4096: [2 * MS, 4 * MS, 4 * MS], 65536: [2 * MS, 2 * MS, 2 * MS]},
    "nixl": {4096: [16 * MS, 16 * MS, 16 * MS], 65536: [8 * MS, 8 * MS, 8 * MS]},
    "nixl-np": {4096: [12 * MS, 12 * MS, 12 * MS], 65536: [10 * MS, 10 * MS, 10 * MS]},
    "raw-tcp": {4096: [5 * MS] * 3, 65536: [5 * MS] * 3},
    "ours-tcp": {4096: [5 * MS] * 3, 65536: [4 * MS] * 3},
}


def make_document(states=None, seconds=SECONDS):
    plan = make_plan(seconds)
    machine = {"cpu": "test", "cpus": 2}
    return build_document(plan, make_result(seconds, states), {"machine": machine, "versions": {"x": "1"}})


def print_to_text(document):
    console = Console(file=io.StringIO(), width=160)
    print_document(document, console)
    return console.file.getvalue()


def test_gb_per_s_is_the_payload_over_the_median_of_the_rounds_without_tuning():
    document = make_document()
    assert document["gb_per_s"]["copy-limit"]["4096"] == pytest.approx(MIB / 2e-3 / 1e9)
    assert document["gb_per_s"]["ours-mapped"]["4096"] == pytest.approx(MIB / 4e-3 / 1e9)


def test_ratios_are_by_piece_and_take_the_best_of_a_family_at_each_piece():
    ratios = make_document()["ratios"]
    assert list(ratios) == RATIO_NAMES
    assert ratios["pull_mapped_vs_copy_limit"] == pytest.approx({"4096": 0.5, "65536": 0.5})
    assert ratios["pull_mapped_vs_nixl"] == pytest.approx({"4096": 3.0, "65536": 4.0})
    assert ratios["pull_tcp_vs_raw"] == pytest.approx({"4096": 1.0, "65536": 1.25})


def test_missing_peer_leaves_an_empty_ratio_and_is_named_in_the_table():
    document = make_document({"mooncake": "not installed"})
    assert document["ratios"]["pull_mapped_vs_mooncake"] == {}
    text = print_to_text(document)
    assert "Mooncake TE, TCP: not installed: no module named x" in text
    assert "3.00×" in text


def test_contender_with_wrong_bytes_has_no_numbers():
    document = make_document({"ours-mapped": "wrong bytes"})
    assert "ours-mapped" not in document["gb_per_s"]
    assert document["ratios"]["pull_mapped_vs_nixl"] == {}
    assert "wrong bytes" in print_to_text(document)


def test_document_holds_every_sample_and_survives_json():
    document = json.loads(json.dumps(make_document()))
    assert document["bench"] == "transfer"
    assert document["format"] == 1
    samples = [s for s in document["samples"] if s["contender"] == "nixl" and s["phase"] == "round"]
    assert [s["seconds"] for s in samples if s["piece_bytes"] == 4096] == [16 * MS] * 3
    assert {"machine", "versions", "settings", "contenders"} <= document.keys()
    assert document["settings"]["pieces"] == [4096, 65536]
