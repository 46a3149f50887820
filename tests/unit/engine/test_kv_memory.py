# SPDX-License-Identifier: Apache-2.0
"""Block counts that put every layer on a 2 MiB boundary, and tensors that lie there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_ascend_pd.config import EXTRA_CONFIG_KEY
from vllm_ascend_pd.engine import kv_memory
from vllm_ascend_pd.engine.kv_memory import ALIGNMENT, aligned_num_blocks, has_pd_role
from vllm_ascend_pd.errors import PDConfigError

KIB = 1024


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    current = SimpleNamespace(cpu=True)
    current.is_cpu = lambda: current.cpu
    module = ModuleType("vllm.platforms")
    module.current_platform = current
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    return current


def config(extra=None) -> SimpleNamespace:
    extra = {EXTRA_CONFIG_KEY: {}} if extra is None else extra
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(max_model_len=4096),
    )


def group(page_bytes: int, needed_bytes: int = 0) -> SimpleNamespace:
    spec = SimpleNamespace(page_size_bytes=page_bytes, max_memory_usage_bytes=lambda _: needed_bytes)
    return SimpleNamespace(kv_cache_spec=spec)


@pytest.mark.parametrize(
    ("page_bytes", "num_blocks", "expected"),
    [
        (32 * KIB, 1000, 960),  # 64 blocks are 2 MiB
        (2048 * KIB, 7, 7),  # a block is 2 MiB itself
        (4096 * KIB, 7, 7),  # or more
        (48 * KIB, 1000, 896),  # 128 blocks are 6 MiB: not a power of two
        (36 * KIB, 1000, 512),  # MLA: 576 values of a token
        (1000, 1_000_000, 786432),  # 8 * 125: 262144 blocks
    ],
)
def test_the_stride_of_a_layer_is_a_multiple_of_2_mib_and_as_few_blocks_as_possible_are_lost(
    page_bytes: int, num_blocks: int, expected: int
):
    rounded = aligned_num_blocks(config(), [group(page_bytes)], num_blocks)
    assert rounded == expected
    assert rounded * page_bytes % ALIGNMENT == 0
    more = range(rounded + 1, num_blocks + 1)
    assert not any(count * page_bytes % ALIGNMENT == 0 for count in more)


def test_every_layer_of_every_group_is_aligned():
    nested = SimpleNamespace(
        kv_cache_specs={"a": SimpleNamespace(page_size_bytes=48 * KIB), "b": SimpleNamespace(page_size_bytes=8 * KIB)},
        page_size_bytes=56 * KIB,
        max_memory_usage_bytes=lambda _: 0,
    )
    groups = [SimpleNamespace(kv_cache_spec=nested), group(32 * KIB)]
    rounded = aligned_num_blocks(config(), groups, 1000)
    assert rounded == 768
    assert all(rounded * size * KIB % ALIGNMENT == 0 for size in (48, 8, 32))


def test_other_engines_keep_their_blocks(platform: SimpleNamespace):
    assert aligned_num_blocks(config({}), [group(32 * KIB)], 1000) == 1000
    assert aligned_num_blocks(SimpleNamespace(), [group(32 * KIB)], 1000) == 1000
    platform.cpu = False
    assert aligned_num_blocks(config(), [group(32 * KIB)], 1000) == 1000


def test_a_role_inside_a_multi_connector_counts():
    assert has_pd_role(config({"connectors": [{}, {"kv_connector_extra_config": {EXTRA_CONFIG_KEY: {}}}]}))
    assert not has_pd_role(config({"connectors": [{"kv_connector_extra_config": None}]}))
    assert not has_pd_role(SimpleNamespace(kv_transfer_config=None))


def test_too_little_memory_is_an_error_that_says_what_to_raise():
    with pytest.raises(PDConfigError, match=r"63 blocks, but 64 .* --kv-cache-memory-bytes"):
        aligned_num_blocks(config(), [group(32 * KIB)], 63)


@pytest.mark.parametrize(("needed_blocks", "fits"), [(63, True), (64, False)])
def test_a_pool_that_rounding_makes_too_small_for_the_longest_request_is_refused(needed_blocks: int, fits: bool):
    """127 blocks would do, 64 are left, and one of them is the null block."""
    groups = [group(32 * KIB, needed_blocks * 32 * KIB)]
    if fits:
        assert aligned_num_blocks(config(), groups, 127) == 64
        return
    with pytest.raises(PDConfigError, match=r"4096 needs 64 .* only 64 are left"):
        aligned_num_blocks(config(), groups, 127)


class FakeArena:
    """Offsets instead of memory."""

    created: list[int]

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.address, self.huge_pages = num_bytes, 0, ""

    @classmethod
    def create(cls, num_bytes: int, name: str) -> FakeArena:
        cls.created.append(num_bytes)
        return cls(num_bytes)

    def as_tensor(self) -> range:
        return range(self.num_bytes)


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    FakeArena.created = []
    monkeypatch.setattr(kv_memory, "Arena", FakeArena)
    monkeypatch.setattr(kv_memory, "_current", None)
    return FakeArena.created


def test_tensors_that_are_allocated_one_by_one_lie_in_one_arena_each_aligned(arenas: list[int]):
    """0.23.0."""
    sizes = [ALIGNMENT + 1, 5, 3 * ALIGNMENT]
    kv_config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=size) for size in sizes])
    tensors = [kv_memory._take(kv_config, size) for size in sizes]
    assert arenas == [6 * ALIGNMENT]
    assert [(t.start, len(t)) for t in tensors] == [(0, sizes[0]), (2 * ALIGNMENT, 5), (3 * ALIGNMENT, sizes[2])]


def test_one_backing_for_all_layers_is_one_arena(arenas: list[int]):
    """0.32.0: the size asked for is the size of all."""
    kv_config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=5, layers=["l0", "l1"])])
    assert len(kv_memory._take(kv_config, 4 * ALIGNMENT)) == 4 * ALIGNMENT
    assert arenas == [4 * ALIGNMENT]
    with pytest.raises(PDConfigError, match="left"):
        kv_memory._take(kv_config, 1)


def test_another_engine_of_the_process_gets_another_arena(arenas: list[int]):
    for _ in range(2):
        kv_memory._take(SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=7)]), 7)
    assert arenas == [ALIGNMENT, ALIGNMENT]
