# SPDX-License-Identifier: Apache-2.0
"""Our delta beside vllm-ascend's published sources, read and not imported: hooks, replaced code, versions."""

from __future__ import annotations

import ast
import sys
import types
from dataclasses import replace

import pytest

from tools.ascend.check import check_all, find_crossings, layer_hook_faults
from tools.ascend.hooks import OURS, find_hook_calls
from tools.ascend.overrides import find_overrides
from tools.ascend.sources import RELEASE, load_modules
from tools.fork import InsertFirst
from tools.fork.delta import REPO, load_edits
from tools.fork.errors import ForkError
from tools.fork.index import Index
from vllm_ascend_pd.ascend import pairing, together


@pytest.fixture(scope="module")
def modules():
    try:
        return load_modules(Index())
    except ForkError as error:
        pytest.skip(f"run `python -m tools.ascend fetch` and `python -m tools.fork fetch`: {error}")


def test_the_checked_release_is_the_one_that_the_start_asks_for():
    assert RELEASE == pairing.VLLM_ASCEND


def test_hooks_fit_and_every_edit_in_replaced_code_is_reviewed(modules):
    assert check_all(modules) == []


def test_known_replacements_are_found(modules):
    """Were one of these missed, the check above would say nothing."""
    found = {(o.where, o.place[1]): o.continues for o in find_overrides(modules)}
    recompute = "vllm_ascend/core/recompute_scheduler.py:RecomputeScheduler"
    patches = "vllm_ascend/patch/platform"
    expected = {
        (f"{recompute}.update_from_output", "Scheduler.update_from_output"): False,
        (f"{recompute}.schedule", "Scheduler.schedule"): False,
        (f"{recompute}.add_request", "Scheduler.add_request"): False,
        (f"{recompute}._update_waiting_for_remote_kv", "Scheduler._update_waiting_for_remote_kv"): False,
        ("vllm_ascend/core/scheduler_dynamic_batch.py:SchedulerDynamicBatch.schedule", "Scheduler.schedule"): False,
        ("vllm_ascend/core/scheduler_profiling_chunk.py:ProfilingChunkScheduler.schedule", "Scheduler.schedule"): False,
        (f"{patches}/patch_balance_schedule.py:BalanceScheduler.schedule", "Scheduler.schedule"): True,
        (f"{patches}/patch_balance_schedule.py:vllm.v1.core.sched.scheduler.Scheduler", "Scheduler"): True,
        (f"{patches}/patch_balance_schedule.py:EngineCoreProc.run_engine_core", "EngineCoreProc.run_engine_core"): True,
        (f"{patches}/patch_async_swa_kv_lifetime.py:Scheduler.__init__", "Scheduler.__init__"): True,
        (f"{patches}/patch_profiling_chunk.py:EngineCore.__init__", "EngineCore.__init__"): True,
        (
            f"{patches}/patch_kv_cache_coordinator.py:_kv_cache_manager.get_kv_cache_coordinator",
            "get_kv_cache_coordinator",
        ): False,
        ("vllm_ascend/worker/model_runner_v1.py:NPUModelRunner.execute_model", "GPUModelRunner.execute_model"): False,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_an_edit_in_schedule_would_be_noticed(modules):
    edit = next(e for e in load_edits() if e.path.endswith("sched/scheduler.edit.py"))
    edit = replace(edit, ops=(InsertFirst("pass", scope="Scheduler.schedule"),))
    where = {crossing.override.where for crossing in find_crossings([edit], modules, find_overrides(modules))}
    assert len([w for w in where if w.endswith(".schedule")]) >= 4


def test_the_hooks_of_runner_worker_and_schedulers_are_among_those_bound(modules):
    calls = find_hook_calls(modules)
    bound = {(call.where.partition(":")[0].rpartition("/")[2], call.name) for call in calls}
    assert {
        ("model_runner_v1.py", "register_kv_caches"),
        ("model_runner_v1.py", "handle_preemptions"),
        ("worker.py", "get_handshake_metadata"),
        ("utils.py", "wait_for_layer_load"),
        ("utils.py", "save_kv_layer"),
        ("patch_balance_schedule.py", "get_num_new_matched_tokens"),
        ("patch_balance_schedule.py", "build_connector_meta"),
        ("kv_connector_model_runner_mixin.py", "start_load_kv"),
        ("core.py", "set_xfer_handshake_metadata_pp_aware"),
        ("scheduler.py", "request_finished_all_groups"),
    } <= bound


def test_the_version_of_the_lane_passes_vllm_ascends_own_comparison(modules, monkeypatch):
    """Its own function, cut out of its source; `vllm` is a module with the version that our wheel leaves as it is."""
    from packaging.version import InvalidVersion, Version

    tree = ast.parse(modules.source("vllm_ascend.utils"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "vllm_version_is")
    function.decorator_list = []
    names = {
        "Version": Version,
        "InvalidVersion": InvalidVersion,
        "envs_ascend": types.SimpleNamespace(VLLM_VERSION=None),
    }
    exec(compile(ast.Module([function], []), "vllm_ascend/utils.py", "exec"), names)
    version: dict[str, str] = {}
    exec(modules.source("vllm._version"), version)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version["__version__"]))
    assert names["vllm_version_is"]("0.23.0")
    assert not names["vllm_version_is"]("0.22.0")
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.23.0+pd.1.ascend"))
    assert not names["vllm_version_is"]("0.23.0")


def test_refused_settings_are_words_that_vllm_ascend_reads(modules):
    text = b"".join(modules.source(f"vllm_ascend.{name}") for name in ("ascend_config", "envs", "platform")).decode()
    quantisation = modules.source("vllm_ascend.quantization.modelslim_config").decode()
    for word in (
        "recompute_scheduler_enable",
        "enable_balance_scheduling",
        "VLLM_ASCEND_BALANCE_SCHEDULING",
        "SLO_limits_for_dynamic_batch",
        "profiling_chunk_config",
        "xlite_graph_config",
        "enable_kv_nz",
        "enable_sparse_sfa_c8",
        "enable_sparse_li_c8",
        "ASCEND_LAUNCH_BLOCKING",
    ):
        assert f'"{word}"' in text, word
    for attribute in together.QUANTISED_CACHES:
        assert f"self.{attribute} = " in quantisation


def test_layer_hooks_do_nothing_so_replayed_graphs_miss_nothing():
    source = (REPO / OURS[0]).read_bytes()
    assert layer_hook_faults(source) == []
    start = source.index(b"def save_kv_layer")
    broken = source[:start] + source[start:].replace(b"        return\n", b"        self.x()\n", 1)
    assert "save_kv_layer does something" in layer_hook_faults(broken)[0]
