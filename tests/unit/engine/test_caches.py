# SPDX-License-Identifier: Apache-2.0
"""vLLM's and vllm-ascend's caches as regions: what is understood, and what is refused by the layer's name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_ascend_pd.engine.caches import (
    MAX_REGIONS,
    check_regions,
    describe_caches,
    describe_groups,
    find_device,
    refuse_nz,
)
from vllm_ascend_pd.engine.scheduler import SchedulerHalf
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.plan.layout import CacheGroup, Region, build_layout

NUM_BLOCKS = 12
LAYER = "model.layers.0.self_attn.attn"
GROUP = CacheGroup("mla", 128, (LAYER,), 1, 576, "bfloat16", 147456)


def make_spec(kind: str, **fields):
    values = {"block_size": 128, "num_kv_heads": 1, "head_size": 576, "page_size_bytes": 147456, **fields}
    return type(kind, (), {"dtype": torch.bfloat16, **values})()


def groups_of(*specs):
    made = [SimpleNamespace(layer_names=[f"l{i}"], kv_cache_spec=spec) for i, spec in enumerate(specs)]
    return describe_groups(SimpleNamespace(kv_cache_groups=made))


def part(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def describe(cache):
    """The regions of one layer, in the order of its parts."""
    layout = describe_caches({LAYER: cache}, NUM_BLOCKS, [GROUP])
    return [layout.caches[model][index] for model, index in layout.slots_of_layer[LAYER]]


# Shapes as vllm-ascend 0.23.0's runner makes them.
VLLM_ASCEND = {
    "GQA: K, V": ([part(NUM_BLOCKS, 128, 8, 128), part(NUM_BLOCKS, 128, 8, 128)], [262144, 262144]),
    "MLA: nope, rope": ([part(NUM_BLOCKS, 128, 1, 512), part(NUM_BLOCKS, 128, 1, 64)], [131072, 16384]),
    "sparse: nope, rope, indexer": (
        [part(NUM_BLOCKS, 128, 1, 512), part(NUM_BLOCKS, 128, 1, 64), part(NUM_BLOCKS, 128, 1, 128)],
        [131072, 16384, 32768],
    ),
    "sparse C8: nope, rope, indexer, scale": (
        [
            part(NUM_BLOCKS, 128, 1, 512),
            part(NUM_BLOCKS, 128, 1, 64),
            part(NUM_BLOCKS, 128, 1, 128, dtype=torch.int8),
            part(NUM_BLOCKS, 128, 1, 1, dtype=torch.float16),
        ],
        [131072, 16384, 16384, 256],
    ),
    "packed C8: one part": ([part(NUM_BLOCKS, 128, 1, 656, dtype=torch.int8)], [83968]),
}


@pytest.mark.parametrize(("parts", "block_bytes"), VLLM_ASCEND.values(), ids=VLLM_ASCEND)
@pytest.mark.parametrize("container", [tuple, list])
def test_each_part_of_a_layer_is_a_region_in_the_order_of_the_tuple(parts, block_bytes, container):
    regions = describe(container(parts))
    assert [region.address for region in regions] == [tensor.data_ptr() for tensor in parts]
    assert [region.block_bytes for region in regions] == block_bytes
    assert {region.num_blocks for region in regions} == {NUM_BLOCKS}


def test_kernel_blocks_that_are_smaller_make_one_region_of_whole_blocks():
    """Block 5 of the scheduler is the kernel's blocks 20 to 23."""
    tensor = torch.arange(NUM_BLOCKS * 4 * 32 * 2, dtype=torch.int32).view(NUM_BLOCKS * 4, 32, 1, 2)
    (region,) = describe((tensor,))
    assert (region.num_blocks, region.block_bytes) == (NUM_BLOCKS, 4 * 32 * 2 * 4)
    assert region.address + 5 * region.block_bytes == tensor[20].data_ptr()


def test_planes_before_the_blocks_are_parts():
    """vLLM 0.23.0 on CPU: [2, num_blocks, …]."""
    tensor = part(2, NUM_BLOCKS, 8, 128, 64)
    assert [region.address for region in describe(tensor)] == [tensor[0].data_ptr(), tensor[1].data_ptr()]


def page_views() -> list[torch.Tensor]:
    """As DeepSeek-V4's: an indexer's K and scale, interleaved in pages of one raw tensor."""
    raw = torch.zeros(NUM_BLOCKS * 4096, dtype=torch.int8)
    return [
        raw.as_strided((NUM_BLOCKS, 32, 1, 64), (4096, 64, 64, 1), 0),
        raw.as_strided((NUM_BLOCKS, 32, 1, 2), (4096, 2, 2, 1), 2048),
    ]


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (page_views(), "blocks of part 0 of .*0.self_attn.attn are 2048 bytes at a stride of 4096.*DeepSeek-V4"),
        ((part(NUM_BLOCKS, 8, 4, 2), part(NUM_BLOCKS, 8, 4, 2).transpose(1, 2)), "blocks of part 1 of"),
        (part(8, 7, NUM_BLOCKS), r"part 0 of .* has shape \(8, 7, 12\); blocks \(12\) are not outermost"),
        (page_views()[0].as_strided((NUM_BLOCKS, 2048), (2048, 1)).expand(NUM_BLOCKS, 2048)[:5], "not outermost"),
    ],
    ids=["views into pages", "another order inside a block", "blocks inside", "too few blocks"],
)
def test_blocks_that_are_not_whole_pieces_are_refused_by_part_and_layer(cache, message):
    with pytest.raises(PDConfigError, match=message):
        describe(cache)


def test_layers_that_overlap_without_being_the_same_are_refused():
    """A hybrid's attention inside the pages of Mamba state."""
    raw = torch.zeros(3 * NUM_BLOCKS * 1024, dtype=torch.int8)
    size = NUM_BLOCKS * 1024
    with pytest.raises(PDConfigError, match="overlap"):
        describe((raw[:size].view(NUM_BLOCKS, 1024), raw[512 : size + 512].view(NUM_BLOCKS, 1024)))


def test_kinds_of_vllm_and_vllm_ascend_are_known():
    specs = ["FullAttentionSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec", "SlidingWindowSpec"]
    groups = groups_of(*(make_spec(kind, compress_ratio=1) for kind in specs))
    assert [group.kind for group in groups] == ["full", "mla", "mla", "sliding_window"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec("MambaSpec"), "MambaSpec .layers l0 .*: the state of Mamba and GDN layers"),
        (make_spec("AscendSlidingWindowMLASpec"), "DeepSeek-V4"),
        (make_spec("AscendMLAAttentionSpec", compress_ratio=4), r"DeepSeek-V4 \(compress_ratio 4\)"),
        (make_spec("AscendMLAAttentionSpec", sfa_dcp_replicated_indexer_size=2), "kept 2 times"),
        (make_spec("NovelSpec"), "NovelSpec"),
        (SimpleNamespace(kv_cache_specs={"a": make_spec("FullAttentionSpec"), "b": make_spec("MambaSpec")}), "Mamba"),
    ],
)
def test_kinds_that_cannot_be_handed_over_are_refused_by_name(spec, message):
    with pytest.raises(PDConfigError, match=message):
        groups_of(spec)


@pytest.mark.parametrize("additional", [{"enable_kv_nz": True}, {"enable_kv_nz": 1, "other": 2}])
def test_the_nz_format_is_refused_by_the_flags_name(additional):
    with pytest.raises(PDConfigError, match="enable_kv_nz is true, with --pd-role it has to be false"):
        refuse_nz(SimpleNamespace(additional_config=additional))


@pytest.mark.parametrize("additional", [None, {}, {"enable_kv_nz": False}])
def test_caches_in_the_plain_format_are_not_refused(additional):
    refuse_nz(SimpleNamespace(additional_config=additional))


def regions(count: int, parts: int = 2) -> dict[str, tuple[Region, ...]]:
    address = iter(range(1 << 21, 1 << 60, 1 << 21))
    return {f"l{i}": tuple(Region(next(address), NUM_BLOCKS, 256) for _ in range(parts)) for i in range(count)}


def check(parts, is_device=True):
    group = replace(GROUP, layers=tuple(parts))
    check_regions(build_layout(parts, [group.layers]), [group], is_device=is_device)


def test_a_base_that_is_not_aligned_is_refused_with_its_address_part_and_layer():
    parts = regions(3)
    parts["l1"] = (parts["l1"][0], replace(parts["l1"][1], address=0x7F0000201000))
    with pytest.raises(PDConfigError, match="part 1 of l1 begins at 0x7f0000201000, which is 4096 bytes after a 2 MiB"):
        check(parts)


def test_the_scale_of_a_sparse_c8_indexer_is_refused_with_what_to_turn_off():
    parts = regions(1, parts=4)
    parts["l0"] = (*parts["l0"][:3], replace(parts["l0"][3], address=parts["l0"][2].address + 3 * 4096))
    with pytest.raises(PDConfigError, match="part 3 of l0 begins at .* With enable_sparse_li_c8 .* turn it off"):
        check(parts)


def test_more_regions_than_a_process_can_register_are_refused_with_the_numbers():
    check(regions(127))  # 254, and the staging buffer
    with pytest.raises(PDConfigError, match=f"257 memory regions.*128 layers, 256 distinct.*register {MAX_REGIONS}"):
        check(regions(128))
    check(regions(128), is_device=False)


def test_shared_memory_counts_once():
    parts = regions(100)
    check({**parts, **{f"shared{i}": parts[f"l{i % 100}"] for i in range(200)}})


def test_caches_on_several_devices_are_refused():
    with pytest.raises(PDConfigError, match="cpu, meta"):
        find_device({"a": (part(1), part(1)), "b": part(1).to("meta")})
    assert find_device({"a": (part(1), part(1))}) == torch.device("cpu")


def told_by_ranks(*caches):
    """What the handshake's record says after the ranks told how they have ordered their caches."""
    half = object.__new__(SchedulerHalf)
    half.prefill, half._record = None, {"layout": {"groups": []}}
    half.set_ranks((), caches)
    return half._record["layout"]["caches"]


def test_the_handshake_tells_the_order_once_where_all_ranks_are_alike():
    ours, other = [{"kind": "mla", "layers": {}}], [{"kind": "full", "layers": {}}]
    assert told_by_ranks(ours, ours) == [ours]
    assert told_by_ranks(ours, other) == [ours, other]
