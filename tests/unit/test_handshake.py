# SPDX-License-Identifier: Apache-2.0
"""The handshake: each field that matters is refused by its name and both values, one at a time (F68)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_ascend_pd import handshake
from vllm_ascend_pd.handshake import INFORMATION, MUST_BE_EQUAL, Difference, build_record, compare

LAYOUT = {
    "groups": [
        {"kind": "full", "block_size": 32, "layers": ["layers.0", "layers.1"], "num_kv_heads": 2, "head_size": 16},
        {"kind": "sliding_window", "block_size": 32, "layers": ["layers.2"], "num_kv_heads": 2, "window": 64},
    ]
}


def vllm_config(model: str) -> SimpleNamespace:
    hf_config = {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 2.0}, "_name_or_path": model}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            seed=0,
            hf_config=SimpleNamespace(to_dict=lambda: hf_config),
            quantization=None,
            dtype="torch.bfloat16",
            max_model_len=2048,
            logits_processors=None,
            logprobs_mode="raw_logprobs",
            max_logprobs=20,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=32, prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        structured_outputs_config=SimpleNamespace(backend="auto", reasoning_parser=""),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        device_config=SimpleNamespace(device_type="npu"),
        speculative_config=None,
        lora_config=None,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def record(model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(handshake, "find_kv_layout", lambda: "NHD")  # asks vLLM
    return build_record(vllm_config(str(model)), SimpleNamespace(host_transport="auto"), LAYOUT)


def test_equal_records_have_no_difference(record: dict[str, Any]) -> None:
    assert compare(record, copy.deepcopy(record)) == []


def test_a_record_survives_the_wire(record: dict[str, Any]) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    assert compare(record, sent) == []
    assert json.loads(json.dumps(record)) == record


def test_every_field_of_a_record_is_compared_or_told_on_purpose(record: dict[str, Any]) -> None:
    assert set(record) == {*MUST_BE_EQUAL, *handshake.MUST_OVERLAP, *INFORMATION}


def mutate(value: Any) -> Any:
    """Another value of the same kind, changed in one leaf."""
    if isinstance(value, dict):
        key = next(iter(value))
        return {**value, key: mutate(value[key])}
    if isinstance(value, list):
        return [mutate(value[0]), *value[1:]]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("field", MUST_BE_EQUAL)
def test_one_changed_field_is_the_one_that_is_named(record: dict[str, Any], field: str) -> None:
    """F68."""
    theirs = {**record, field: mutate(record[field])}
    (difference,) = compare(record, theirs)
    assert difference.field.split(".")[0].split("[")[0] == field
    assert difference.ours != difference.theirs


@pytest.mark.parametrize("field", MUST_BE_EQUAL)
def test_a_missing_field_is_a_difference_on_either_side(record: dict[str, Any], field: str) -> None:
    """F68: an older peer that does not send a field is not taken for equal."""
    without = {key: value for key, value in record.items() if key != field}
    assert any("(absent)" in d.theirs for d in compare(record, without))
    assert any("(absent)" in d.ours for d in compare(without, record))


@pytest.mark.parametrize("field", INFORMATION)
def test_fields_that_do_not_touch_the_kv_are_not_refused(record: dict[str, Any], field: str) -> None:
    assert compare(record, {**record, field: "something else"}) == []


def test_the_difference_is_named_down_to_the_leaf(record: dict[str, Any]) -> None:
    theirs = copy.deepcopy(record)
    theirs["model_config"]["rope_scaling"]["factor"] = 4.0
    assert compare(record, theirs) == [Difference("model_config.rope_scaling.factor", "2.0", "4.0")]
    theirs = copy.deepcopy(record)
    theirs["layout"]["groups"][1]["window"] = 128
    assert compare(record, theirs) == [Difference("layout.groups[1].window", "64", "128")]


def test_lists_of_unequal_length_are_refused_as_such(record: dict[str, Any]) -> None:
    """F71: never paired by position up to the shorter one."""
    theirs = copy.deepcopy(record)
    theirs["layout"]["groups"].pop()
    assert Difference("layout.groups.length", "2", "1") in compare(record, theirs)


def test_one_common_transport_is_enough(record: dict[str, Any]) -> None:
    assert compare({**record, "transports": ["tcp", "mapped"]}, {**record, "transports": ["tcp"]}) == []
    (difference,) = compare({**record, "transports": ["mapped"]}, {**record, "transports": ["tcp"]})
    assert difference.field == "transports"


def test_what_one_side_could_not_read_is_no_difference(record: dict[str, Any]) -> None:
    def with_tls(tls: str) -> dict[str, Any]:
        return {**record, "data_plane": {"implementation": "cann", "tls": tls}}

    assert compare(with_tls("on"), with_tls(handshake.UNKNOWN)) == []
    assert compare(with_tls(handshake.UNKNOWN), with_tls("off")) == []
    assert compare(with_tls("on"), with_tls("off")) == [Difference("data_plane.tls", "on", "off")]


def test_two_long_values_stay_apart_when_shortened() -> None:
    found = compare({"weights": "a" * 500 + "1"}, {"weights": "a" * 500 + "2"})
    (weights,) = [difference for difference in found if difference.field == "weights"]
    assert weights.ours != weights.theirs
    assert len(weights.ours) < 130


def test_the_place_of_a_model_does_not_matter_but_its_weights_do(model: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    content = (model / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(content)
    here = handshake.identify_weights(vllm_config(str(model)))
    assert handshake.identify_weights(vllm_config(str(copied))) == here
    (copied / "model.safetensors").write_bytes(content[:-1] + b"\x00")
    assert handshake.identify_weights(vllm_config(str(copied))) != here


def test_random_weights_are_told_apart_by_their_seed(model: Path) -> None:
    dummy = vllm_config(str(model))
    dummy.load_config.load_format = "dummy"
    first = handshake.identify_weights(dummy)
    dummy.model_config.seed = 1
    assert handshake.identify_weights(dummy) != first


def test_where_a_config_came_from_is_not_part_of_it() -> None:
    described = handshake.describe_hf_config({"_name_or_path": "/a", "transformers_version": "5", "hidden_size": 1})
    assert described == {"hidden_size": 1}
