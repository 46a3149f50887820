# SPDX-License-Identifier: Apache-2.0
"""`bench stages`: how memory is cut, ratios from recorded samples, and that every method moves the right bytes."""

from __future__ import annotations

import ctypes
import random

import pytest

from vllm_ascend_pd.bench.stages.fused import Fused, Staged, Straight, make_groups
from vllm_ascend_pd.bench.stages.memory import Memory, WrongBytesError
from vllm_ascend_pd.bench.stages.methods import Limit
from vllm_ascend_pd.bench.stages.per_layer import PerLayer, PerLayerDirect, PerLayerField, PerLayerWide
from vllm_ascend_pd.bench.stages.report import compute_case_seconds as to_cases
from vllm_ascend_pd.bench.stages.report import compute_chart, compute_ratios
from vllm_ascend_pd.bench.stages.run import Sample
from vllm_ascend_pd.bench.stages.shapes import SHAPES, KVShape

MIB = 1 << 20
GQA = KVShape("gqa", "GQA", 3, (128, 128))
MLA = KVShape("mla", "MLA", 3, (256, 64))


@pytest.fixture(scope="module")
def memory():
    return Memory(32 * MIB)


@pytest.mark.parametrize("shape", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("kind", [PerLayerDirect, PerLayerWide, PerLayerField, Staged, Straight, Limit])
def test_ratio_methods_put_every_block_in_place(memory, shape, kind):
    method = kind(2)
    for seed, variant in enumerate(method.variants()):
        cut = memory.cut(shape, 16, 5, one_staging=True)[0]
        method.bind(cut, variant)
        blocks = cut.draw(random.Random(seed))
        assert method.run(blocks) > 0
        cut.verify(blocks)


@pytest.mark.parametrize("shape", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("kind", [PerLayer, Fused])
def test_chart_methods_put_every_block_in_place_with_and_without_syncs(memory, shape, kind):
    method = kind(2)
    for seed, variant in enumerate(method.variants()):
        cut = memory.cut(shape, 16, 5, one_staging=False)[0]
        method.bind(cut, variant)
        blocks = cut.draw(random.Random(seed))
        method.run_stages(blocks)
        cut.verify(blocks)
        method.run_overall(blocks)
        cut.verify(blocks)


def test_verification_finds_one_wrong_byte(memory):
    method = Straight(1)
    cut = memory.cut(MLA, 16, 5, one_staging=True)[0]
    method.bind(cut, method.variants()[0])
    blocks = cut.draw(random.Random(1))
    method.run(blocks)
    place = cut.pieces(cut.dst, 1, blocks.dst)[-1] + 16 * 64 - 1
    ctypes.c_ubyte.from_address(place).value ^= 1
    with pytest.raises(WrongBytesError, match="plane 1"):
        cut.verify(blocks)


def test_a_method_that_does_nothing_is_found(memory):
    cut = memory.cut(GQA, 16, 5, one_staging=True)[0]
    Staged(1).bind(cut, "inline")
    with pytest.raises(WrongBytesError):
        cut.verify(cut.draw(random.Random(2)))


def test_fused_is_one_group_for_all_layers_per_size_of_plane(memory):
    for shape, groups in ((GQA, 1), (MLA, 2)):
        cut = memory.cut(shape, 16, 2, one_staging=True)[0]
        made = make_groups(cut, (cut.src, cut.num_blocks), (cut.dst, cut.num_blocks))
        assert len(made) == groups
        assert sum(group.num_tensors for group in made) == shape.num_layers * 2


def test_large_requests_are_worked_in_even_passes_that_add_up(memory):
    for shape in SHAPES:
        cuts = memory.cut(shape, 16, 20, one_staging=False)
        assert sum(cut.num_layers for cut in cuts) == shape.num_layers
        assert max(cut.num_layers for cut in cuts) - min(cut.num_layers for cut in cuts) <= 1
        for cut in cuts:
            assert cut.num_bytes <= memory.staging_bytes
            assert cut.num_layers * cut.num_blocks * sum(cut.plane_bytes) <= memory.pool_bytes
    assert len(memory.cut(SHAPES[2], 16, 20, one_staging=False)) > 1


def test_what_cannot_be_cut_says_why(memory):
    reason = memory.cut(SHAPES[2], 16, 100_000, one_staging=False)
    assert "--max-memory" in reason
    assert "100000 blocks" in reason


def test_ratios_are_medians_over_medians_and_ideal_is_the_limit_twice():
    seconds = {
        "per-layer": [8.0, 8.0, 80.0],
        "per-layer-wide": [4.0],
        "staged": [2.0, 4.0, 3.0],
        "straight": [1.0],
        "limit": [1.0],
    }
    samples = [
        Sample(case, "llama-3-8b", 16, method, "v", "round", number, value)
        for case in ("1_block", "64_mib")
        for method, values in seconds.items()
        for number, value in enumerate(values)
    ]
    samples.append(Sample("64_mib", "llama-3-8b", 16, "staged", "v", "tune", 0, 1e9))
    ratios = compute_ratios(to_cases(samples))
    for case in ("1_block", "64_mib"):
        assert ratios[f"staged_vs_per_layer_{case}"] == {"llama-3-8b": pytest.approx(8 / 3)}
        assert ratios[f"straight_vs_per_layer_{case}"] == {"llama-3-8b": pytest.approx(8.0)}
    assert ratios["staged_vs_per_layer_wide_64_mib"] == {"llama-3-8b": pytest.approx(4 / 3)}
    assert ratios["staged_vs_ideal"] == {"llama-3-8b": pytest.approx(1.5)}
    assert ratios["staged_vs_per_layer_1_block_cold"] == {}


def test_chart_takes_the_median_of_each_stage():
    stages = [{"extract": 1.0, "inject": 2.0}, {"extract": 3.0, "inject": 2.0}, {"extract": 2.0, "inject": 9.0}]
    samples = [
        Sample("tokens", "gqa", 1024, "fused", "v", "round", number, 5.0 + number, row)
        for number, row in enumerate(stages)
    ]
    row = compute_chart(samples)["gqa"]["1024"]["fused"]
    assert row == {"overall": 6.0, "extract": 2.0, "scatter": 0.0, "pull": 0.0, "inject": 2.0}
