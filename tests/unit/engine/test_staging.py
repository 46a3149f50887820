# SPDX-License-Identifier: Apache-2.0
"""Which staging a rank gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.engine.staging import make_staging, settle_transfer
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.npu.order import HostOrder
from vllm_ascend_pd.plan.layout import Region, build_layout
from vllm_ascend_pd.transfer.staging.copier import HostCopier


def make_config(transfer: str, role: PDRole = PDRole.DECODE) -> PDConfig:
    return PDConfig(role=role, engine_id="d", epoch="e", runtime_dir="/tmp/x", transfer=transfer)


def make_engine(device: str, drafter: object = None) -> SimpleNamespace:
    return SimpleNamespace(device_config=SimpleNamespace(device_type=device), speculative_config=drafter)


@pytest.mark.parametrize(
    ("engine", "transfer", "settled"),
    [
        (make_engine("npu", "mtp"), "auto", "staged"),
        (make_engine("npu", "mtp"), "staged", "staged"),
        (make_engine("npu"), "auto", "auto"),
        (make_engine("npu"), "straight", "straight"),
        (make_engine("cpu", "mtp"), "auto", "auto"),
        (make_engine("cpu", "mtp"), "straight", "straight"),
    ],
)
def test_with_a_drafter_on_an_npu_every_transfer_waits_for_the_prefill_sides_device(engine, transfer, settled):
    assert settle_transfer(make_config(transfer), engine).transfer == settled


def test_straight_with_a_drafter_on_an_npu_is_refused():
    with pytest.raises(PDConfigError, match="--pd-transfer straight: with --speculative-config on an NPU"):
        settle_transfer(make_config("straight"), make_engine("npu", "mtp"))


def stage(transfer: str, role: PDRole = PDRole.DECODE, block_bytes: int = 4096):
    layout = build_layout({"l0": (Region(1 << 21, 4, block_bytes),)}, [["l0"]])
    return make_staging(make_config(transfer, role), layout, {}, HostOrder(), torch.device("cpu"))


@pytest.mark.parametrize(("role", "num_slots"), [(PDRole.PREFILL, 4), (PDRole.DECODE, 2)])
def test_on_a_cpu_slots_lie_in_host_memory(role, num_slots):
    made = stage("auto", role)
    assert made is not None
    assert (made.buffer.num_slots, made.buffer.model_id) == (num_slots, 1)
    assert isinstance(made.copier, HostCopier)


def test_a_rank_that_only_pulls_straight_has_none():
    assert stage("straight") is None


def test_blocks_larger_than_a_slot_are_not_staged_and_refused_where_that_was_asked_for():
    assert stage("auto", block_bytes=17 << 20) is None
    with pytest.raises(PDConfigError, match="--pd-transfer staged: a KV block"):
        stage("staged", block_bytes=17 << 20)
