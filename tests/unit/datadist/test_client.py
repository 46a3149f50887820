# SPDX-License-Identifier: Apache-2.0
"""Loading CANN's package, and what stands between it and the connector; over made-up packages. Not run on an NPU."""

from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace

import pytest

from vllm_ascend_pd import datadist
from vllm_ascend_pd.datadist import client
from vllm_ascend_pd.datadist.api import Way
from vllm_ascend_pd.datadist.guard import DOCUMENTED_REGIONS, MAX_REGIONS, GuardedDataDist
from vllm_ascend_pd.datadist.settings import choose_way
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode
from vllm_ascend_pd.errors import PDConfigError

MIB2 = 2 << 20
ONE_SIDED = ("link_clusters", "unlink_clusters")
TWO_SIDED = ("link", "unlink", "query_register_mem_status")


class Engine:
    """CANN's LLMDataDist, as far as the guard calls it."""

    def __init__(self, *_) -> None:
        self.cluster_id = 5
        self.cache_manager = Manager()
        self.calls: list = []

    def init(self, options) -> None:
        options["llm.Role"] = "Prompt"  # as some releases do

    def link_clusters(self, clusters, timeout):
        self.calls.append((clusters, timeout))
        if timeout < 0:
            raise ValueError("timeout's value is out of range")
        return LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS]

    def finalize(self) -> None:
        self.calls.append("finalize")


class Manager:
    """CANN's CacheManager."""

    def __init__(self) -> None:
        self.registered: list = []
        self.pulled: list = []

    def register_blocks_cache(self, desc, addrs, key, accessible):
        self.registered.append((addrs, key.model_id, accessible))
        return SimpleNamespace(cache_id=len(self.registered))

    def unregister_cache(self, cache_id) -> None:
        pass

    def pull_blocks(self, key, cache, src, dst, **kwargs) -> None:
        if -1 in src:
            raise TypeError("incompatible function arguments")
        self.pulled.append((src, dst, kwargs))


PACKAGE = SimpleNamespace(LLMException=LLMException, LLMStatusCode=LLMStatusCode)
DESC = SimpleNamespace(size=MIB2)


@pytest.fixture
def engine():
    return GuardedDataDist(Engine(), PACKAGE)


def key(model_id: int) -> SimpleNamespace:
    return SimpleNamespace(model_id=model_id)


def addresses(count: int, first: int = 1) -> list[int]:
    return [(first + index) * MIB2 for index in range(count)]


def package_with(engine_names: tuple[str, ...], settings: tuple[str, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(
        LLMConfig=type("LLMConfig", (), dict.fromkeys(settings)),
        LLMDataDist=type("LLMDataDist", (), dict.fromkeys(engine_names)),
    )


@pytest.mark.parametrize(
    ("engine_names", "settings", "ways"),
    [
        (ONE_SIDED + TWO_SIDED, ("local_comm_res", "transfer_backend"), (Way.HIXL, Way.COMM_RES, Way.TWO_SIDED)),
        (ONE_SIDED, ("local_comm_res", "transfer_backend"), (Way.HIXL, Way.COMM_RES)),
        (ONE_SIDED + TWO_SIDED, ("local_comm_res",), (Way.COMM_RES, Way.TWO_SIDED)),
        (ONE_SIDED + TWO_SIDED, (), (Way.TWO_SIDED,)),
        (("link_clusters", *TWO_SIDED), ("local_comm_res", "transfer_backend"), (Way.TWO_SIDED,)),
        (TWO_SIDED[:2], ("local_comm_res", "transfer_backend"), ()),
    ],
)
def test_a_way_is_there_when_all_that_it_needs_is_there(engine_names, settings, ways):
    assert client.find_ways(package_with(engine_names, settings)) == ways


def test_a_package_that_lacks_a_name_is_refused_by_the_name(monkeypatch):
    fake = types.ModuleType("llm_datadist")
    for name in ("LLMDataDist", *client.NAMES):
        if name != "BlocksCacheKey":
            setattr(fake, name, object)
    monkeypatch.setitem(sys.modules, "llm_datadist", fake)
    with pytest.raises(ImportError, match="lacks BlocksCacheKey: install CANN"):
        datadist.load("cann")


def test_the_best_way_is_taken_and_a_rank_table_asks_for_its_own():
    module = SimpleNamespace(name="cann", ways=(Way.HIXL, Way.TWO_SIDED))
    assert choose_way(module, False) is Way.HIXL
    assert choose_way(module, True) is Way.TWO_SIDED
    assert choose_way(datadist.load("host"), False) is Way.HOST
    with pytest.raises(PDConfigError, match="--pd-rank-table: there are no NPUs here"):
        choose_way(datadist.load("host"), True)
    with pytest.raises(PDConfigError, match="--pd-rank-table: this CANN release"):
        choose_way(SimpleNamespace(name="cann", ways=(Way.HIXL,)), True)
    with pytest.raises(PDConfigError, match="install CANN 8.5 or later"):
        choose_way(SimpleNamespace(name="cann", ways=()), False)


def test_options_that_the_package_writes_into_are_a_copy(engine):
    options = {"a": "b"}
    engine.init(options)
    assert options == {"a": "b"}


def test_each_registration_is_passed_on(engine):
    manager = engine.cache_manager
    manager.register_blocks_cache(DESC, addresses(2), key(0), True)
    manager.register_blocks_cache(DESC, addresses(1, 9), key(1), remote_accessible=True)
    assert manager._manager.registered == [(addresses(2), 0, True), (addresses(1, 9), 1, True)]
    assert engine.cache_manager is manager


def test_the_257th_region_is_refused(engine):
    manager = engine.cache_manager
    manager.register_blocks_cache(DESC, addresses(MAX_REGIONS - 1), key(0))
    manager.register_blocks_cache(DESC, addresses(1, 500), key(1))
    with pytest.raises(PDConfigError, match="257 memory regions to register, llm_datadist takes 256"):
        manager.register_blocks_cache(DESC, addresses(1, 501), key(2))
    manager.unregister_cache(2)
    manager.register_blocks_cache(DESC, addresses(1, 501), key(2))


def test_more_than_documented_is_said(engine, caplog):
    with caplog.at_level(logging.WARNING):
        engine.cache_manager.register_blocks_cache(DESC, addresses(DOCUMENTED_REGIONS), key(0))
        assert caplog.text == ""
        engine.cache_manager.register_blocks_cache(DESC, addresses(1, 500), key(1))
        assert "241 regions" in caplog.text
        caplog.clear()
        engine.cache_manager.register_blocks_cache(SimpleNamespace(size=51 << 30), addresses(1, 600), key(2))
        assert "GiB are registered" in caplog.text


def test_a_name_that_is_taken_is_refused(engine):
    engine.cache_manager.register_blocks_cache(DESC, addresses(1), key(3))
    with pytest.raises(PDConfigError, match="model_id 3 is registered twice"):
        engine.cache_manager.register_blocks_cache(DESC, addresses(1, 2), key(3))


def test_a_misaligned_base_is_refused_with_its_address(engine):
    with pytest.raises(PDConfigError, match=r"tensor 1 of model_id 0 begins at 0x401000.*4096-aligned"):
        engine.cache_manager.register_blocks_cache(DESC, [MIB2, 2 * MIB2 + 4096], key(0))
    assert engine.cache_manager._manager.registered == []


def test_nothing_is_registered_after_the_first_link(engine):
    engine.link_clusters([1], 500)
    with pytest.raises(PDConfigError, match="after the first link"):
        engine.cache_manager.register_blocks_cache(DESC, addresses(1), key(0))


def test_what_the_binding_cannot_take_is_an_invalid_parameter(engine):
    with pytest.raises(LLMException, match="out of range") as failure:
        engine.link_clusters([1], -1)
    assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMException, match="pull_blocks: incompatible") as failure:
        engine.cache_manager.pull_blocks(key(0), None, [-1], [0])
    assert failure.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_a_pull_is_passed_on_with_lists(engine):
    engine.cache_manager.pull_blocks(key(0), None, (1, 2), (3, 4), src_layer_range=range(2))
    assert engine.cache_manager._manager.pulled == [([1, 2], [3, 4], {"src_layer_range": range(2)})]
