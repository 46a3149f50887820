# SPDX-License-Identifier: Apache-2.0
"""The names of the package, and those that it refuses (datadist-api.md §0)."""

from __future__ import annotations

import pytest

from tests.contract.implementation import LLMConfig, LLMRole, LLMStatusCode, Placement, Status, module, only

NAMES = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "CacheTask",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
]


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there(name):
    assert getattr(module, name).__name__ in (name, "LLMConfig", "LlmConfig")


def test_the_configuration_has_two_names():
    assert module.LlmConfig is LLMConfig


@pytest.mark.parametrize(
    "name",
    ["Tensor", "TensorDesc", "KvCacheManager", pytest.param("KvCache", marks=only("host", "CANN has the name"))],
)
def test_names_of_the_old_mode_cannot_be_imported(name):
    with pytest.raises(ImportError):
        getattr(module, name)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Module 'llm_datadist' has no attribute 'Nonsense'"):
        _ = module.Nonsense


def test_status_object_wraps_a_code():
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(LLMStatusCode.LLM_TIMEOUT).is_ok()
    assert Status(LLMStatusCode.LLM_TIMEOUT).status_code is LLMStatusCode.LLM_TIMEOUT


def test_enumerations_print_their_class():
    assert [str(LLMRole.MIX), str(Placement.HOST)] == ["LLMRole.MIX", "Placement.HOST"]
