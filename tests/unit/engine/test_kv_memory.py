# SPDX-License-Identifier: Apache-2.0
"""Block counts that put every layer on a 2 MiB boundary, and tensors that lie there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_ascend_pd.config import EXTRA_CONFIG_KEY, PDConfig, PDRole
from vllm_ascend_pd.engine import kv_memory
from vllm_ascend_pd.engine.kv_memory import (
    ALIGNMENT,
    aligned_num_blocks,
    has_pd_role,
    keep_device_bytes,
)
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.transfer.staging.reserve import LINKS_EXPECTED, reserved_device_bytes

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


# ---------------------------------------------------------------- device memory beside the caches

MIB = 1 << 20
CANN = SimpleNamespace(name="cann")
LINK_BYTES = 8 * MIB


def pd_config(role: PDRole = PDRole.PREFILL, transfer: str = "auto") -> PDConfig:
    return PDConfig(role=role, engine_id="p", epoch="e", runtime_dir="/tmp/x", transfer=transfer)


def npu_engine(transfer: str = "auto", device: str = "npu", explicit: int | None = None) -> SimpleNamespace:
    made = config({EXTRA_CONFIG_KEY: pd_config(transfer=transfer).to_dict()})
    made.device_config = SimpleNamespace(device_type=device)
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=explicit)
    made.parallel_config = None
    made.model_config.hf_text_config = SimpleNamespace()
    made.model_config.get_num_layers = lambda _: 61
    return made


@pytest.mark.parametrize(
    ("role", "transfer", "staging_mib"),
    [(PDRole.PREFILL, "auto", 4 * 16 + 2), (PDRole.DECODE, "staged", 2 * 16 + 2), (PDRole.DECODE, "straight", 0)],
)
def test_reserved_is_staging_and_links_and_what_aligning_tensors_costs(role, transfer, staging_mib):
    none = reserved_device_bytes(pd_config(role, transfer), 0, module=CANN)
    assert staging_mib * MIB <= none <= (staging_mib + 4) * MIB, "and a table of caches"
    assert reserved_device_bytes(pd_config(role, transfer), 3, module=CANN) - none == 3 * LINK_BYTES
    assert reserved_device_bytes(pd_config(role, transfer), 0, 122, module=CANN) - none == 122 * ALIGNMENT


def test_an_npus_caches_get_what_is_left():
    reserved = reserved_device_bytes(pd_config(), LINKS_EXPECTED, 2 * 61, CANN)
    assert keep_device_bytes(npu_engine(), [5 << 30, 6 << 30], CANN) == [(5 << 30) - reserved, (6 << 30) - reserved]


@pytest.mark.parametrize(
    "engine",
    [npu_engine(device="cpu"), npu_engine(explicit=1 << 30), SimpleNamespace(kv_transfer_config=None)],
    ids=["CPU", "a size of the user's own", "no PD"],
)
def test_nothing_is_taken_off_where_nothing_has_to_stay_free(engine):
    assert keep_device_bytes(engine, [1 << 30], CANN) == [1 << 30]


def test_too_little_device_memory_is_refused_with_both_numbers():
    with pytest.raises(PDConfigError, match=r"100 MiB of device memory .* take 4\d\d MiB: raise --gpu-memory-util"):
        keep_device_bytes(npu_engine(), [100 * MIB], CANN)
