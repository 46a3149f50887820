# SPDX-License-Identifier: Apache-2.0
"""Which implementation is chosen, and options that only the host implementation has."""

from __future__ import annotations

import sys
import threading
import types

import pytest

from tests.unit.datadist.datadist_peer import SECRET, make_options
from vllm_ascend_pd import datadist
from vllm_ascend_pd.datadist import choose, client
from vllm_ascend_pd.datadist.host.llm_datadist import LLMDataDist
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode, check_type, to_status
from vllm_ascend_pd.datadist.types import LLMRole

DIRECT = {"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}


@pytest.fixture
def engine():
    instance = LLMDataDist(LLMRole.PROMPT, 1)
    yield instance
    instance.finalize()


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"llm.listenIpInfo": "0.0.0.0:0"}, "LLM_PARAM_INVALID"),  # no secret
        ({"llm.listenIpInfo": "192.0.2.1:80", "pd.host.secret": SECRET}, "LLM_FAILED"),  # not ours
        ({"pd.host.secret": "zz"}, "LLM_PARAM_INVALID"),
        ({"pd.host.secret": "ab" * 15}, "LLM_PARAM_INVALID"),
        ({"pd.host.transport": "rdma"}, "LLM_PARAM_INVALID"),
    ],
)
def test_bad_option_of_ours_fails_init(engine, options, status):
    with pytest.raises(LLMException) as failure:
        engine.init({**DIRECT, **options})
    assert failure.value.status_code is LLMStatusCode[status]


def test_finalize_ends_all_threads(engine):
    engine.init(make_options({}))
    assert any(thread.name.startswith("datadist") for thread in threading.enumerate())
    engine.finalize()
    assert not any(thread.name.startswith("datadist") for thread in threading.enumerate())


def test_load_prefers_cann_only_with_a_device(monkeypatch):
    fake = types.ModuleType("llm_datadist")
    for name in ("LLMDataDist", *client.NAMES):
        setattr(fake, name, f"cann {name}")
    fake.__spec__ = types.SimpleNamespace(name="llm_datadist")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "llm_datadist", fake)
    monkeypatch.setattr(choose, "_DEVICE_FILES", "/nowhere/davinci*")
    assert datadist.load().name == "host"
    assert datadist.load("host").LLMDataDist is LLMDataDist
    monkeypatch.setattr(choose, "_DEVICE_FILES", "/dev/null")
    assert datadist.load().name == "cann"
    assert datadist.load("cann").LLMConfig == "cann LLMConfig"
    assert datadist.load("host").name == "host"


def test_load_of_what_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_datadist", None)
    with pytest.raises(ImportError, match="llm_datadist cannot be imported"):
        datadist.load("cann")
    with pytest.raises(ValueError, match="prefer must be"):
        datadist.load("gpu")


def test_cann_answers_what_only_the_host_knows():
    class Cann:
        pass

    assert datadist.listening_port(Cann()) is None
    assert datadist.link_transport(Cann(), 5) == "cann"


def test_unknown_status_is_failed():
    assert to_status(12345) is LLMStatusCode.LLM_FAILED


def test_none_passes_a_type_check_unless_forbidden():
    check_type("x", None, int)
    with pytest.raises(TypeError, match="x only support"):
        check_type("x", None, int, allow_none=False)
    with pytest.raises(TypeError, match="inner type"):
        check_type("x", [1, "2"], list, int)
