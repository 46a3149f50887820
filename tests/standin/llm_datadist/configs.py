# SPDX-License-Identifier: Apache-2.0
"""Roles, peers, settings (datadist-api.md §2, §3.2). A release that lacks a setting lacks its attribute."""

from __future__ import annotations

import socket

from llm_datadist._release import HAS_COMM_RES, HAS_HIXL, RELEASE, BaseEnum
from llm_datadist.status import raise_if_false
from llm_datadist.utils.utils import (
    check_dict,
    check_int32,
    check_isinstance,
    check_uint16,
    check_uint32,
    check_uint64,
)

LLMRole = BaseEnum("LLMRole", {"PROMPT": 1, "DECODER": 2, "MIX": 3}, module=__name__)


def trans_str_ip(ip):
    """A dotted address as the engine's integer, which is little-endian."""
    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except OSError:
        raise RuntimeError(f"Can not parse ip str:{ip}") from None


class LLMClusterInfo:
    """A peer to link to."""

    def __init__(self):
        self._id = None
        self._role = LLMRole.PROMPT
        self._local = []
        self._remote = []

    @property
    def remote_cluster_id(self):
        return self._id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value):
        check_uint64("remote_cluster_id", value)
        self._id = value

    @property
    def remote_role_type(self):
        return self._role

    @remote_role_type.setter
    def remote_role_type(self, value):
        check_isinstance("remote_role_type", value, (LLMRole, int))
        self._role = value

    @property
    def local_ip_info_list(self):
        return self._local

    @property
    def remote_ip_info_list(self):
        return self._remote

    def append_local_ip_info(self, ip, port):
        self._local.append(_address(ip, port))

    def append_remote_ip_info(self, ip, port):
        self._remote.append(_address(ip, port))


def _address(ip, port):
    check_isinstance("ip", ip, (str, int), allow_none=False)
    check_uint16("port", port)
    if isinstance(ip, int):
        check_uint32("ip", ip)
        return ip, port
    return trans_str_ip(ip), port


def _is(kind):
    return lambda name, value: check_isinstance(name, value, kind, allow_none=False)


def _milliseconds(name, value):
    check_isinstance(name, value, (int, str), allow_none=False)
    text = str(value)
    raise_if_false(text.isdigit() and 0 < int(text) < 2**31, f"{name} {value!r} is no positive int32")


def _retries(name, value):
    check_int32(name, value)
    raise_if_false(0 < value <= 100, f"{name} {value} is not in 1..100")


def _share(name, value):
    check_isinstance(name, value, float, allow_none=False)
    raise_if_false(0.0 <= value <= 1.0, f"{name} {value} is not in 0..1")


def _devices(name, value):
    for device in value if isinstance(value, (list, tuple)) else (value,):
        check_int32(name, device)
        raise_if_false(device >= 0, f"{name} {device} is negative")


def _texts(name, value):
    check_dict(name, value, str, str)


def _flag(value):
    return "1" if value else "0"


# setting -> (check, option, to text, default, whether an empty value becomes an option too)
_SETTINGS = {
    "ge_options": (_texts, None, None, {}, False),
    "device_id": (_devices, None, None, None, False),
    "listen_ip_info": (_is(str), "llm.listenIpInfo", str, "", False),
    "sync_kv_timeout": (_milliseconds, "llm.SyncKvCacheWaitTime", str, None, True),
    "deploy_res_path": (_is(str), "llm.deployResPath", str, "", False),
    "enable_cache_manager": (_is(bool), "llm.EnableCacheManager", _flag, False, True),
    "enable_remote_cache_accessible": (_is(bool), "llm.EnableRemoteCacheAccessible", _flag, False, True),
    "mem_pool_cfg": (_is(str), "llm.MemPoolConfig", str, "", False),
    "host_mem_pool_cfg": (_is(str), "llm.HostMemPoolConfig", str, "", False),
    "buf_pool_cfg": (_is(str), "llm.BufPoolCfg", str, "", False),
    "rdma_traffic_class": (check_uint32, "llm.RdmaTrafficClass", str, None, True),
    "rdma_service_level": (check_uint32, "llm.RdmaServiceLevel", str, None, True),
    "local_comm_res": (_is(str), "llm.LocalCommRes", str, "", True),
    "link_total_time": (check_uint32, "llm.LinkTotalTime", str, 0, True),
    "link_retry_count": (_retries, "llm.LinkRetryCount", str, 1, True),
    "transfer_backend": (_is(str), "llm.TransferBackend", str, "", True),
    "global_resource_config": (_is(str), "llm.GlobalResourceConfig", str, "", True),
    "enable_switch_role": (_is(bool), "llm.EnableSwitchRole", _flag, False, False),
    "mem_utilization": (_share, "llm.MemoryUtilization", str, 0.95, True),
    "output_max_size": (check_int32, "llm.OutputMaxSize", str, None, True),
    "cluster_info": (_is(str), "llm.ClusterInfo", str, "", False),
}
if not HAS_COMM_RES:
    del _SETTINGS["local_comm_res"]
if not HAS_HIXL:
    del _SETTINGS["transfer_backend"]
if RELEASE != "9.2.0":
    del _SETTINGS["global_resource_config"]


def _property(name):
    check, _, _, default, _ = _SETTINGS[name]

    def write(self, value):
        check(name, value)
        self._given[name] = value

    return property(lambda self: self._given.get(name, default), write)


class LlmConfig:
    """A bag of settings; `generate_options` fills one dictionary and never takes anything out of it."""

    def __init__(self):
        self._given = {}
        self._options = {}

    @property
    def options(self):
        return self._options

    def generate_options(self):
        self._options.update(self.ge_options)
        devices = self.device_id
        if devices is not None:
            devices = devices if isinstance(devices, (list, tuple)) else (devices,)
            self._options["ge.exec.deviceId"] = ";".join(map(str, devices))
            self._options["ge.session_device_id"] = str(devices[0])
        for name, (_, option, to_text, default, even_empty) in _SETTINGS.items():
            value = self._given.get(name, default if name == "mem_utilization" else None)
            if option is not None and value is not None and (even_empty or value):
                self._options[option] = to_text(value)
        return self._options

    gen_options = generate_options


for _name in _SETTINGS:
    setattr(LlmConfig, _name, _property(_name))
