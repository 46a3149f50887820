# SPDX-License-Identifier: Apache-2.0
"""What `LLMDataDist.init(options)` means to the host engine; every check in the interface's order (§1.1)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from vllm_ascend_pd.datadist.config import OPTION_SECRET, OPTION_TRANSPORT
from vllm_ascend_pd.datadist.status import LLMStatusCode, check_type, fail, require
from vllm_ascend_pd.native.plane import MAX_CONNECTIONS

OPTION_CONNECTIONS: Final = "pd.host.connections"  # TCP connections of a link, in either direction
OPTION_THREADS: Final = "pd.host.threads"  # threads that serve all incoming connections
TRANSPORTS: Final = ("auto", "mapped", "tcp")
_MIN_SECRET_BYTES: Final = 16
_DEFAULT_TIMEOUT_MS: Final = 1000
_DEFAULT_CONNECTIONS: Final = 2
_DEFAULT_THREADS: Final = 2
_MAX_THREADS: Final = 64


@dataclass(frozen=True)
class EngineOptions:
    """Parsed options."""

    listen: tuple[str, int] | None
    sync_timeout_ms: int
    secret: bytes  # empty: loopback without a secret
    transport: str
    has_comm_res: bool
    num_connections: int = _DEFAULT_CONNECTIONS
    num_threads: int = _DEFAULT_THREADS


def parse_options(given: dict[str, str]) -> EngineOptions:
    """Raises TypeError, ValueError, LLMException, ModuleNotFoundError (the old mode without cache manager)."""
    check_type("options", given, dict, allow_none=False)
    memory = given.get("ge.flowGraphMemMaxSize")
    if "ge.flowGraphMemMaxSize" in given:
        check_type("ge.flowGraphMemMaxSize", memory, str, allow_none=False)
        require(str(memory).isdigit(), f"ge.flowGraphMemMaxSize must be one number, not {memory!r}")
    options = dict(given)
    if "llm.LocalCommRes" in options:
        options.setdefault("llm.EnableCacheManager", "1")
        options.setdefault("llm.EnableRemoteCacheAccessible", "1")
        require(options["llm.EnableCacheManager"] == "1", "llm.LocalCommRes needs llm.EnableCacheManager 1")
    is_cache_manager = options.get("llm.EnableCacheManager") == "1"
    if "llm.TransferBackend" in options:
        _check_backend(options, is_cache_manager)
    if not is_cache_manager:
        raise ModuleNotFoundError(
            "llm.EnableCacheManager is not 1: that mode needs llm_datadist_v1, which the host implementation lacks",
            name="llm_datadist_v1",
        )
    listen = parse_listen(options["llm.listenIpInfo"]) if options.get("llm.listenIpInfo") else None
    _check_engine_options(options)
    secret = _parse_secret(options.get(OPTION_SECRET), listen)
    transport = options.get(OPTION_TRANSPORT, "auto")
    require(transport in TRANSPORTS, f"{OPTION_TRANSPORT} must be one of {TRANSPORTS}, not {transport!r}")
    timeout = int(options.get("llm.SyncKvCacheWaitTime", _DEFAULT_TIMEOUT_MS))
    return EngineOptions(
        listen,
        timeout,
        secret,
        transport,
        bool(options.get("llm.LocalCommRes")),
        _parse_count(options, OPTION_CONNECTIONS, _DEFAULT_CONNECTIONS, MAX_CONNECTIONS),
        _parse_count(options, OPTION_THREADS, _DEFAULT_THREADS, _MAX_THREADS),
    )


def _parse_count(options: dict[str, str], name: str, default: int, highest: int) -> int:
    text = options.get(name, str(default))
    require(text.isdecimal() and 1 <= int(text) <= highest, f"{name} must be in 1..{highest}, not {text!r}")
    return int(text)


def _check_backend(options: dict[str, str], is_cache_manager: bool) -> None:
    backend = options["llm.TransferBackend"]
    require(is_cache_manager, "llm.TransferBackend needs llm.EnableCacheManager 1")
    accessible = options.get("llm.EnableRemoteCacheAccessible", "1")
    require(accessible == "1", "llm.TransferBackend needs llm.EnableRemoteCacheAccessible 1")
    require(bool(options.get("llm.listenIpInfo")), "llm.TransferBackend needs llm.listenIpInfo")
    require(backend == "hixl", f"llm.TransferBackend {backend!r} is unknown")
    fail(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "llm.TransferBackend hixl: the host implementation has no such backend")


def parse_listen(text: str) -> tuple[str, int]:
    """The two parts of `ip:port`; numeric IPv4 only. Raises LLMException, ValueError for the port."""
    check_type("llm.listenIpInfo", text, str, allow_none=False)
    parts = text.split(":")
    require(len(parts) == 2, f"llm.listenIpInfo must be ip:port, not {text!r}")
    port = int(parts[1])
    require(0 <= port < 2**16, f"llm.listenIpInfo: port {port} is out of range")
    try:
        return str(ipaddress.IPv4Address(parts[0])), port
    except ValueError:
        fail(LLMStatusCode.LLM_PARAM_INVALID, f"llm.listenIpInfo: {parts[0]!r} is not an IPv4 address")


def _check_engine_options(options: dict[str, str]) -> None:
    device = options.get("ge.exec.deviceId", "0")
    require(";" not in device, f"ge.exec.deviceId {device!r}: one device per process")
    for name in ("llm.EnableCacheManager", "llm.EnableRemoteCacheAccessible"):
        value = options.get(name, "0")
        if value not in ("0", "1"):
            fail(LLMStatusCode.LLM_FAILED, f"{name} must be 0 or 1, not {value!r}")
    timeout = options.get("llm.SyncKvCacheWaitTime", "1")
    require(timeout.isdigit() and int(timeout) > 0, f"llm.SyncKvCacheWaitTime must be milliseconds, not {timeout!r}")
    retries = options.get("llm.LinkRetryCount", "1")
    require(retries.isdigit() and 1 <= int(retries) <= 100, f"llm.LinkRetryCount must be in 1..100, not {retries!r}")
    if options.get("llm.EnableRemoteCacheAccessible", "0") != "1":
        fail(
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            "llm.EnableRemoteCacheAccessible is not 1: the host implementation has direct mode only",
        )


def _parse_secret(text: str | None, listen: tuple[str, int] | None) -> bytes:
    if text is None:
        if listen is not None and not ipaddress.IPv4Address(listen[0]).is_loopback:
            fail(
                LLMStatusCode.LLM_PARAM_INVALID,
                f"llm.listenIpInfo {listen[0]} is not loopback: {OPTION_SECRET} is required",
            )
        return b""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        fail(LLMStatusCode.LLM_PARAM_INVALID, f"{OPTION_SECRET} is not hexadecimal")
    require(
        len(secret) >= _MIN_SECRET_BYTES,
        f"{OPTION_SECRET} has {len(secret)} bytes, at least {_MIN_SECRET_BYTES} are needed",
    )
    return secret
