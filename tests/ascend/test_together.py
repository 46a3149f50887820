# SPDX-License-Identifier: Apache-2.0
"""What does not go together is refused by name, value and remedy; everything else passes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from vllm_ascend_pd.ascend.together import RULES, Settings, find_refusals, refuse_model, refuse_settings
from vllm_ascend_pd.errors import PDConfigError

BROKEN = {
    "recompute-scheduler": ({"recompute_scheduler_enable": True}, {}, "recompute_scheduler_enable=true"),
    "balance-scheduler": ({"enable_balance_scheduling": 1}, {}, "enable_balance_scheduling=1"),
    "dynamic-batch-scheduler": ({"SLO_limits_for_dynamic_batch": 50}, {}, "SLO_limits_for_dynamic_batch=50"),
    "profiling-scheduler": ({"profiling_chunk_config": {"enabled": True}}, {}, "profiling_chunk_config="),
    "xlite": ({"xlite_graph_config": {"enabled": True, "full_mode": True}}, {}, "xlite_graph_config="),
    "kv-nz": ({"enable_kv_nz": True}, {}, "enable_kv_nz=true"),
    "sparse-sfa-c8": ({"enable_sparse_sfa_c8": True}, {}, "enable_sparse_sfa_c8=true"),
    "sparse-li-c8": ({"enable_sparse_li_c8": True}, {}, "enable_sparse_li_c8=true"),
    "launch-blocking": ({}, {"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING=1"),
}
HARMLESS = {
    "recompute_scheduler_enable": False,
    "enable_balance_scheduling": False,
    "SLO_limits_for_dynamic_batch": -1,
    "profiling_chunk_config": {"enabled": False},
    "xlite_graph_config": {},
    "enable_kv_nz": False,
    "ascend_scheduler_config": {"enabled": True},
    "torchair_graph_config": {"enabled": True},
}


def test_every_rule_has_a_case():
    assert [rule.name for rule in RULES] == list(BROKEN)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_rule_names_what_was_given_the_role_and_what_it_has_to_be(name, role):
    additional, environ, given = BROKEN[name]
    assert [rule.name for rule, _ in find_refusals(Settings(role, additional, environ, False))] == [name]
    with pytest.raises(PDConfigError, match=rf"{re.escape(given)}.* does not go with --pd-role {role}: it has to be "):
        refuse_settings(role, additional, environ, eager=False)


def test_the_variable_of_balance_scheduling_counts_too():
    with pytest.raises(PDConfigError, match="VLLM_ASCEND_BALANCE_SCHEDULING=1 does not go with"):
        refuse_settings("prefill", {}, {"VLLM_ASCEND_BALANCE_SCHEDULING": "1"}, eager=False)
    refuse_settings("prefill", {}, {"VLLM_ASCEND_BALANCE_SCHEDULING": "0"}, eager=False)


def test_all_broken_rules_are_named_at_once():
    with pytest.raises(PDConfigError) as caught:
        refuse_settings("decode", {"enable_kv_nz": True, "recompute_scheduler_enable": True}, {}, eager=False)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("additional", [HARMLESS, {}, None, "text"])
def test_what_is_off_or_unknown_passes(additional):
    refuse_settings("decode", additional, {"ASCEND_LAUNCH_BLOCKING": "0"}, eager=False)


def test_launch_blocking_goes_with_eager_mode():
    refuse_settings("decode", {}, {"ASCEND_LAUNCH_BLOCKING": "1"}, eager=True)


@pytest.mark.parametrize("attribute", ["enable_c8_quant", "enable_fa_quant"])
def test_caches_that_only_the_decode_side_quantises_are_refused_there(attribute):
    quantised = SimpleNamespace(**{attribute: True})
    with pytest.raises(PDConfigError, match="keeps them in int8 on decode instances"):
        refuse_model("decode", quantised)
    refuse_model("prefill", quantised)
    refuse_model("decode", SimpleNamespace(enable_c8_quant=False, enable_fa_quant=False))
    refuse_model("decode", None)
