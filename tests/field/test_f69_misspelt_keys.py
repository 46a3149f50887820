# SPDX-License-Identifier: Apache-2.0
"""F69: configuration with a wrong, misspelt or missing key.

Must: an error that names the key. Was: ignored, or KV went astray.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import engine_kwargs
from tests.e2e.engines import Engine, Zygote
from tests.field.conftest import MODEL
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.front.flags import VARIABLES, read_options

GOOD = PDConfig(role=PDRole.DECODE, engine_id="d", epoch="e", runtime_dir="/run/x").to_dict()
REQUIRED = ("role", "engine_id", "epoch", "runtime_dir")


def misspell(word: str, position: int) -> str:
    """One letter less."""
    position %= len(word)
    return word[:position] + word[position + 1 :]


@given(key=st.sampled_from(sorted(GOOD)), position=st.integers(0, 30))
def test_f69_a_misspelt_key_is_named_and_the_right_one_suggested(key: str, position: int):
    wrong = misspell(key, position)
    values = {wrong if k == key else k: v for k, v in GOOD.items()}
    with pytest.raises(PDConfigError) as caught:
        PDConfig.from_dict(values)
    assert repr(wrong) in str(caught.value)
    assert "did you mean" in str(caught.value)


@pytest.mark.parametrize("key", REQUIRED)
def test_f69_a_missing_key_is_named(key: str):
    with pytest.raises(PDConfigError, match=key):
        PDConfig.from_dict({k: v for k, v in GOOD.items() if k != key})


@given(variable=st.sampled_from(VARIABLES), position=st.integers(9, 40))
def test_f69_a_misspelt_environment_variable_is_named(variable: str, position: int):
    # Behind the prefix: without it a variable is somebody else's.
    stem = variable.removeprefix("VLLM_PD_")
    wrong = "VLLM_PD_" + misspell(stem, position)
    with pytest.raises(PDConfigError, match=f"^{wrong}: unknown"):
        read_options(SimpleNamespace(), {wrong: "1"})


@pytest.mark.parametrize(
    ("flags", "environ", "names"),
    [
        ({"pd_prefill": ["http://p:1"]}, {}, ["--pd-prefill", "--pd-role"]),
        ({"pd_role": "prefill", "pd_prefill": ["http://p:1"]}, {}, ["--pd-prefill", "--pd-role"]),
        ({"pd_role": "prefil"}, {}, ["--pd-role", "'prefill'"]),
        ({}, {"VLLM_PD_ROLE": "decoder"}, ["VLLM_PD_ROLE", "'decode'"]),
        ({"pd_role": "decode", "pd_prefill": ["p:1"]}, {}, ["--pd-prefill", "http://p:1"]),
        ({"pd_role": "decode", "pd_prefill": ["http://p"]}, {}, ["--pd-prefill", "no port"]),
        ({"pd_role": "decode", "pd_load_failure": "retry"}, {}, ["--pd-load-failure", "reprefill"]),
        ({"pd_role": "prefill", "pd_lease": "soon"}, {}, ["--pd-lease", "'soon'"]),
        ({"pd_role": "prefill", "pd_lease": "0"}, {}, ["--pd-lease"]),
        ({"pd_role": "prefill", "pd_listen": "10.0.0.1"}, {}, ["--pd-listen", "--pd-secret-file"]),
    ],
)
def test_f69_a_wrong_value_or_combination_names_the_flag(flags: dict, environ: dict, names: list[str]):
    with pytest.raises(PDConfigError) as caught:
        read_options(SimpleNamespace(**flags), environ)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.engine
def test_f69_the_connector_named_by_hand_without_a_role_is_refused_by_name(zygote: Zygote, engines: list[Engine]):
    """JSON of upstream's flag that names our connector, but not what it needs."""
    by_hand = {"kv_connector": "DataDistConnector", "kv_role": "kv_both"}
    engine = zygote.start("by-hand", engine_kwargs(MODEL, kv_transfer_config=by_hand))
    engines.append(engine)
    assert "--pd-role" in engine.start_error()


@pytest.mark.engine
def test_f69_another_pd_connector_beside_ours_is_refused_by_name(zygote: Zygote, engines: list[Engine]):
    theirs = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    engine = zygote.start("two", engine_kwargs(MODEL, pd_role="decode", kv_transfer_config=theirs))
    engines.append(engine)
    error = engine.start_error()
    assert "NixlConnector" in error
    assert "--pd-role" in error
