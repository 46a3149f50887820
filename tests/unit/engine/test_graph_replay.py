# SPDX-License-Identifier: Apache-2.0
"""A step that is one replay of a full graph runs no Python between layers: nothing of ours may have to run there."""

from __future__ import annotations

import inspect

import pytest

connector = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.datadist.connector")
PER_LAYER = ("wait_for_layer_load", "save_kv_layer")


class Untouched:
    """Stands for either half: using it at all is a failure."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"a hook of a layer used {name}")


def make() -> object:
    made = object.__new__(connector.DataDistConnector)
    made.half = made.worker = Untouched()
    return made


def test_hooks_of_layers_do_nothing():
    made = make()
    assert made.wait_for_layer_load("model.layers.0.self_attn.attn") is None
    assert made.save_kv_layer("model.layers.0.self_attn.attn", object(), object()) is None


def test_full_graphs_are_not_ruled_out():
    """Upstream then leaves the mode as it was asked for."""
    assert connector.DataDistConnector.requires_piecewise_for_cudagraph({}) is False


def test_the_engine_half_has_no_hook_of_a_layer():
    """What does not exist cannot be left out by a replay."""
    from vllm_ascend_pd.engine.worker import WorkerHalf

    names = {name for name, _ in inspect.getmembers(WorkerHalf, inspect.isfunction)}
    assert not [name for name in names if "layer" in name or name in PER_LAYER]


def test_a_step_ends_with_a_mark_and_nothing_that_waits():
    made, seen = make(), []
    made.worker = type("Worker", (), {"step_launched": lambda self: seen.append("mark")})()
    made.wait_for_save()
    assert seen == ["mark"]
