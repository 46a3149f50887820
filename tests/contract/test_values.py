# SPDX-License-Identifier: Apache-2.0
"""Values of the interface: numbers, argument checks, options (datadist-api.md §2, §3)."""

from __future__ import annotations

import pytest

from tests.contract.implementation import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
    only,
    since,
)

FP16 = DataType.DT_FLOAT16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLM_SUCCESS", 0),
        ("LLM_FAILED", 4294967295),
        ("LLM_KV_CACHE_NOT_EXIST", 1343270914),
        ("LLM_PARAM_INVALID", 1343270917),
        ("LLM_NOT_YET_LINK", 1343270919),
        ("LLM_ALREADY_LINK", 1343270920),
        ("LLM_LINK_FAILED", 1343270921),
        ("LLM_UNLINK_FAILED", 1343270922),
        ("LLM_EXIST_LINK", 1343270936),
        ("LLM_FEATURE_NOT_ENABLED", 1343270937),
        ("LLM_TIMEOUT", 1343270938),
        ("LLM_OUT_OF_MEMORY", 1343270940),
        ("LLM_SUSPECT_REMOTE_ERROR", 507057),
    ],
)
def test_status_codes_have_the_interfaces_values(name, value):
    assert LLMStatusCode[name].value == value
    assert str(LLMStatusCode[name]) == f"LLMStatusCode.{name}"
    assert LLMStatusCode(value) is LLMStatusCode[name]


def test_enumerations_have_the_interfaces_values():
    assert [role.value for role in LLMRole] == [1, 2, 3]
    assert (Placement.HOST.value, Placement.DEVICE.value) == (0, 1)
    assert [status.value for status in RegisterMemStatus] == [0, 1, 2]
    assert (DataType.DT_BF16.value, DataType.DT_FLOAT.value, DataType.DT_BOOL.value) == (27, 0, 12)


def test_exception_carries_its_status():
    assert LLMException("x").status_code is LLMStatusCode.LLM_SUCCESS
    error = LLMException("x", status_code=LLMStatusCode.LLM_TIMEOUT)
    assert error.status_code is LLMStatusCode.LLM_TIMEOUT
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((-1, [4, 4], FP16), ValueError),
        (("1", [4, 4], FP16), TypeError),
        ((None, [4, 4], FP16), TypeError),
        ((1, "44", FP16), TypeError),
        ((1, [4, "4"], FP16), TypeError),
        ((1, [4, 4], 1), TypeError),
        ((1, [4, 4], FP16, 1), TypeError),
        ((1, [4, 4], FP16, Placement.DEVICE, 2), LLMException),
        ((1, [4, 4], FP16, Placement.DEVICE, 0, 2), LLMException),
        ((1, [4, 4], FP16, Placement.DEVICE, 0, -2), LLMException),
        ((1, [2**63], FP16), ValueError),
    ],
)
def test_bad_descriptor_is_refused(args, error):
    with pytest.raises(error):
        CacheDesc(*args)


def test_descriptor_properties():
    desc = CacheDesc(2, [8, 4], DataType.DT_BF16, Placement.HOST, 1, 0, "NHD")
    assert (desc.num_tensors, desc.batch_size, desc.batch_dim, desc.seq_len_dim_index) == (2, 4, 1, 0)
    assert (desc.size, desc.placement, desc.kv_tensor_format) == (64, Placement.HOST, "NHD")
    desc.update_dim(0, 16)
    assert desc.size == 128
    with pytest.raises(TypeError):
        CacheDesc(1, (8, 4), FP16).update_dim(0, 1)
    with pytest.raises(LLMException):
        _ = CacheDesc(1, [0, 4], FP16).size


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: CacheKey(1), LLMException),
        (lambda: CacheKey(req_id=1), LLMException),
        (lambda: CacheKey(1, 2, 3, 4, 5), LLMException),
        (lambda: CacheKey(1, 2, cluster_id=1), LLMException),
        (lambda: CacheKey(1, 2, other=1), LLMException),
        (lambda: CacheKey(1, -1), ValueError),
        (lambda: CacheKey(1, "2"), TypeError),
        (lambda: CacheKeyByIdAndIndex(-1, 1), ValueError),
        (lambda: CacheKeyByIdAndIndex(1, 2**63), ValueError),
        (lambda: CacheKeyByIdAndIndex(1, 1, -1), ValueError),
        (lambda: BlocksCacheKey(), LLMException),
        (lambda: BlocksCacheKey(1, 2, 3), LLMException),
        (lambda: BlocksCacheKey("1"), TypeError),
        (lambda: Cache.create_cpu_cache(CacheDesc(1, [4], FP16), [1]), LLMException),
        (lambda: Cache.create_cpu_cache(CacheDesc(2, [4], FP16, Placement.HOST), [1]), LLMException),
    ],
)
def test_bad_key_or_range_is_refused(make, error):
    with pytest.raises(error):
        make()


def test_keys_take_the_old_name_of_the_cluster():
    key = CacheKey(prompt_cluster_id=7, req_id=3)
    assert (key.cluster_id, key.prompt_cluster_id, key.model_id, key.prefix_id) == (7, 7, 0, 2**64 - 1)
    assert BlocksCacheKey(prompt_cluster_id=7, model_id=2).model_id == 2


def test_cluster_info_holds_little_endian_ipv4():
    info = LLMClusterInfo()
    info.append_remote_ip_info("127.0.0.1", 80)
    info.append_remote_ip_info(16777343, 81)
    assert info.remote_ip_info_list == [(16777343, 80), (16777343, 81)]
    for bad in ("::1", "host.example"):
        with pytest.raises(RuntimeError, match="Can not parse ip str"):
            info.append_local_ip_info(bad, 1)
    with pytest.raises(ValueError, match="uint16"):
        info.append_local_ip_info("127.0.0.1", 65536)
    with pytest.raises(TypeError):
        info.remote_cluster_id = None
    with pytest.raises(ValueError, match="uint64"):
        info.remote_cluster_id = -1


def test_fresh_config_yields_one_option():
    assert LLMConfig().generate_options() == {"llm.MemoryUtilization": "0.95"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("device_id", 3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
        ("device_id", [3, 4], {"ge.exec.deviceId": "3;4", "ge.session_device_id": "3"}),
        ("listen_ip_info", "1.2.3.4:5", {"llm.listenIpInfo": "1.2.3.4:5"}),
        ("listen_ip_info", "", {}),
        ("sync_kv_timeout", 77, {"llm.SyncKvCacheWaitTime": "77"}),
        ("sync_kv_timeout", "77", {"llm.SyncKvCacheWaitTime": "77"}),
        ("ge_options", {"a": "b"}, {"a": "b"}),
        ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
        ("enable_remote_cache_accessible", False, {"llm.EnableRemoteCacheAccessible": "0"}),
        ("local_comm_res", "", {"llm.LocalCommRes": ""}),
        pytest.param("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}, marks=since("9.0.0", "hixl")),
        ("rdma_traffic_class", 132, {"llm.RdmaTrafficClass": "132"}),
        ("link_retry_count", 2, {"llm.LinkRetryCount": "2"}),
        ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
        ("enable_switch_role", False, {}),
        ("mem_utilization", 0.5, {"llm.MemoryUtilization": "0.5"}),
    ],
)
def test_config_property_becomes_option(name, value, expected):
    config = LLMConfig()
    setattr(config, name, value)
    assert config.generate_options() == {"llm.MemoryUtilization": "0.95", **expected}
    assert config.generate_options() is config.options


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("device_id", -1, LLMException),
        ("device_id", "0", TypeError),
        ("sync_kv_timeout", 0, LLMException),
        ("sync_kv_timeout", "x", LLMException),
        ("sync_kv_timeout", 2**31, LLMException),
        ("sync_kv_timeout", 1.5, TypeError),
        ("ge_options", {"a": 1}, TypeError),
        ("ge_options", "a", TypeError),
        ("enable_cache_manager", 1, TypeError),
        ("link_retry_count", 101, LLMException),
        ("mem_utilization", 1, TypeError),
        ("mem_utilization", 1.5, LLMException),
        ("listen_ip_info", 5, TypeError),
        ("rdma_service_level", -1, ValueError),
    ],
)
def test_config_refuses_bad_values(name, value, error):
    with pytest.raises(error):
        setattr(LLMConfig(), name, value)


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("device_id", None),
        ("listen_ip_info", ""),
        ("sync_kv_timeout", None),
        ("ge_options", {}),
        ("deploy_res_path", ""),
        ("enable_cache_manager", False),
        ("enable_remote_cache_accessible", False),
        ("mem_pool_cfg", ""),
        ("host_mem_pool_cfg", ""),
        ("buf_pool_cfg", ""),
        ("rdma_traffic_class", None),
        ("rdma_service_level", None),
        ("local_comm_res", ""),
        ("link_total_time", 0),
        ("link_retry_count", 1),
        pytest.param("transfer_backend", "", marks=since("9.0.0", "hixl")),
        pytest.param("global_resource_config", "", marks=only("host", "CANN has it from 9.2 on")),
        ("enable_switch_role", False),
        ("mem_utilization", 0.95),
        ("output_max_size", None),
        ("cluster_info", ""),
        ("options", {}),
    ],
)
def test_config_property_has_its_default(name, default):
    assert getattr(LLMConfig(), name) == default


def test_options_stay_once_they_were_generated():
    config = LLMConfig()
    config.listen_ip_info = "1.2.3.4:5"
    config.generate_options()
    config.listen_ip_info = ""
    assert config.gen_options()["llm.listenIpInfo"] == "1.2.3.4:5"
    with pytest.raises(AttributeError):
        config.options = {}


@pytest.mark.parametrize(
    ("data_type", "num_bytes"),
    [
        ("DT_FLOAT", 4),
        ("DT_FLOAT16", 2),
        ("DT_INT8", 1),
        ("DT_INT32", 4),
        ("DT_UINT8", 1),
        ("DT_INT16", 2),
        ("DT_UINT16", 2),
        ("DT_UINT32", 4),
        ("DT_INT64", 8),
        ("DT_UINT64", 8),
        ("DT_DOUBLE", 8),
        ("DT_BOOL", 1),
        ("DT_STRING", 16),
        ("DT_BF16", 2),
    ],
)
def test_elements_have_their_size(data_type, num_bytes):
    assert CacheDesc(1, [3, 5], DataType[data_type]).size == 15 * num_bytes


def test_keys_are_compared_by_identity():
    assert CacheKey(1, 2) != CacheKey(1, 2)
    assert BlocksCacheKey(1) != BlocksCacheKey(1)
    assert CacheKeyByIdAndIndex(1, 2) != CacheKeyByIdAndIndex(1, 2)
