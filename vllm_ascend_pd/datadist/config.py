# SPDX-License-Identifier: Apache-2.0
"""`LLMConfig`: named settings in, the option dictionary of `LLMDataDist.init` out (datadist-api.md §2).

Plain data, no thread. Options of our own host implementation travel in `ge_options`, which is passed on
verbatim: `pd.host.secret` (hex) and `pd.host.transport` (auto, mapped or tcp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_ascend_pd.datadist.status import check_int32, check_type, check_uint32, require

OPTION_SECRET: Final = "pd.host.secret"
OPTION_TRANSPORT: Final = "pd.host.transport"


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _check_bool(name: str, value: Any) -> None:
    check_type(name, value, bool)


def _check_text(name: str, value: Any) -> None:
    check_type(name, value, str)


def _check_positive(name: str, value: Any) -> None:
    check_type(name, value, (int, str), allow_none=False)
    require(str(value).isdigit() and 0 < int(value) < 2**31, f"{name} must be a positive int32, not {value!r}")


def _check_retries(name: str, value: Any) -> None:
    check_int32(name, value)
    require(1 <= value <= 100, f"{name} must be in 1..100, not {value}")


def _check_share(name: str, value: Any) -> None:
    check_type(name, value, float, allow_none=False)
    require(0.0 <= value <= 1.0, f"{name} must be in 0..1, not {value}")


def _check_options(name: str, value: Any) -> None:
    check_type(name, value, dict, allow_none=False)
    check_type(name, value, dict, str)
    check_type(name, list(value.values()), list, str)


def _check_device(name: str, value: Any) -> None:
    devices = value if isinstance(value, (list, tuple)) else [value]
    for device in devices:
        check_int32(name, device)
        require(device >= 0, f"{name} must not be negative, not {device}")


# property -> (check, option key, to text, default of the getter, emitted even when empty)
_SETTINGS: Final[dict[str, tuple[Callable[[str, Any], None], str, Callable[[Any], str], Any, bool]]] = {
    "listen_ip_info": (_check_text, "llm.listenIpInfo", str, "", False),
    "sync_kv_timeout": (_check_positive, "llm.SyncKvCacheWaitTime", str, None, True),
    "deploy_res_path": (_check_text, "llm.deployResPath", str, "", False),
    "enable_cache_manager": (_check_bool, "llm.EnableCacheManager", _flag, False, True),
    "enable_remote_cache_accessible": (_check_bool, "llm.EnableRemoteCacheAccessible", _flag, False, True),
    "mem_pool_cfg": (_check_text, "llm.MemPoolConfig", str, "", False),
    "host_mem_pool_cfg": (_check_text, "llm.HostMemPoolConfig", str, "", False),
    "buf_pool_cfg": (_check_text, "llm.BufPoolCfg", str, "", False),
    "rdma_traffic_class": (check_uint32, "llm.RdmaTrafficClass", str, None, True),
    "rdma_service_level": (check_uint32, "llm.RdmaServiceLevel", str, None, True),
    "local_comm_res": (_check_text, "llm.LocalCommRes", str, "", True),
    "link_total_time": (check_uint32, "llm.LinkTotalTime", str, 0, True),
    "link_retry_count": (_check_retries, "llm.LinkRetryCount", str, 1, True),
    "transfer_backend": (_check_text, "llm.TransferBackend", str, "", True),
    "global_resource_config": (_check_text, "llm.GlobalResourceConfig", str, "", True),
    "output_max_size": (check_int32, "llm.OutputMaxSize", str, None, True),
    "cluster_info": (_check_text, "llm.ClusterInfo", str, "", False),
}


def _setting(name: str) -> Any:
    check, key, _, default, _ = _SETTINGS[name]

    def read(self: LLMConfig) -> Any:
        return self._values.get(name, default)

    def write(self: LLMConfig, value: Any) -> None:
        check(name, value)
        self._values[name] = value

    return property(read, write, doc=f"Option {key}.")


class LLMConfig:
    """Settings of one LLMDataDist; `generate_options()` gives what `init` takes."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._options: dict[str, str] = {}
        self._ge_options: dict[str, str] = {}
        self._device_id: int | list[int] | tuple[int, ...] | None = None
        self._mem_utilization = 0.95
        self._enable_switch_role = False

    listen_ip_info = _setting("listen_ip_info")
    sync_kv_timeout = _setting("sync_kv_timeout")
    deploy_res_path = _setting("deploy_res_path")
    enable_cache_manager = _setting("enable_cache_manager")
    enable_remote_cache_accessible = _setting("enable_remote_cache_accessible")
    mem_pool_cfg = _setting("mem_pool_cfg")
    host_mem_pool_cfg = _setting("host_mem_pool_cfg")
    buf_pool_cfg = _setting("buf_pool_cfg")
    rdma_traffic_class = _setting("rdma_traffic_class")
    rdma_service_level = _setting("rdma_service_level")
    local_comm_res = _setting("local_comm_res")
    link_total_time = _setting("link_total_time")
    link_retry_count = _setting("link_retry_count")
    transfer_backend = _setting("transfer_backend")
    global_resource_config = _setting("global_resource_config")
    output_max_size = _setting("output_max_size")
    cluster_info = _setting("cluster_info")

    @property
    def device_id(self) -> int | list[int] | tuple[int, ...] | None:
        """Logical device, or several; None until set."""
        return self._device_id

    @device_id.setter
    def device_id(self, value: int | list[int] | tuple[int, ...]) -> None:
        _check_device("device_id", value)
        self._device_id = value

    @property
    def ge_options(self) -> dict[str, str]:
        """Options passed on verbatim."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, value: dict[str, str]) -> None:
        _check_options("ge_options", value)
        self._ge_options = value

    @property
    def enable_switch_role(self) -> bool:
        """Not needed in cache-manager mode."""
        return self._enable_switch_role

    @enable_switch_role.setter
    def enable_switch_role(self, value: bool) -> None:
        _check_bool("enable_switch_role", value)
        self._enable_switch_role = value

    @property
    def mem_utilization(self) -> float:
        """Not used in cache-manager mode."""
        return self._mem_utilization

    @mem_utilization.setter
    def mem_utilization(self, value: float) -> None:
        _check_share("mem_utilization", value)
        self._mem_utilization = value

    @property
    def options(self) -> dict[str, str]:
        """What the last `generate_options()` gave."""
        return self._options

    def generate_options(self) -> dict[str, str]:
        """Merge all settings into the persistent dictionary; every call returns the same object."""
        self._options.update(self._ge_options)
        if self._device_id is not None:
            devices = self._device_id if isinstance(self._device_id, (list, tuple)) else [self._device_id]
            self._options["ge.exec.deviceId"] = ";".join(str(device) for device in devices)
            self._options["ge.session_device_id"] = str(devices[0])
        for name, (_, key, to_text, _, even_empty) in _SETTINGS.items():
            value = self._values.get(name)
            if value is not None and (even_empty or value != ""):
                self._options[key] = to_text(value)
        if self._enable_switch_role:
            self._options["llm.EnableSwitchRole"] = "1"
        self._options["llm.MemoryUtilization"] = str(self._mem_utilization)
        return self._options

    gen_options = generate_options
