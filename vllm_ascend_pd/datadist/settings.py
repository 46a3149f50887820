# SPDX-License-Identifier: Apache-2.0
"""Starting a rank's data plane: the way to link, the options of `init`, the port, the device of a thread.

Runs in worker processes, once, before KV cache memory is registered. What differs between CANN's package and the
host implementation in setting up is here; the connector's worker does not ask which one it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm_ascend_pd.datadist.api import DataDist, DataDistModule, Way
from vllm_ascend_pd.datadist.config import OPTION_SECRET, OPTION_TRANSPORT
from vllm_ascend_pd.datadist.ports import candidates, is_free
from vllm_ascend_pd.errors import PDConfigError

logger = logging.getLogger(__name__)

LINK_TOTAL_S: Final = 20  # of a two-sided link; the package's own default is two minutes
LINK_RESERVE_BYTES: Final = 8 << 20  # 2 to 7 MB each; Source: datadist-api.md §6
TABLE_RESERVE_BYTES: Final = 2 << 20  # the table of registered caches, 1 MiB, and what is rounded up


@dataclass(frozen=True, kw_only=True)
class DataPlaneSettings:
    """What one rank's engine is started with."""

    is_prefill: bool
    host: str  # numeric IPv4, own
    way: Way
    sync_timeout_ms: int
    listen_port: int = 0  # of --pd-listen; the data plane's ports come after it
    device_index: int = 0  # logical
    secret_hex: str = ""  # host implementation
    host_transport: str = "auto"  # host implementation

    @property
    def listens(self) -> bool:
        """Whether peers dial this rank's engine."""
        return self.is_prefill and self.way is not Way.TWO_SIDED


def choose_way(module: DataDistModule, has_rank_table: bool) -> Way:
    """How this rank links: by rank table when one was given, else the best way that the package has.

    Raises:
        PDConfigError: a rank table was given and cannot be used, or there is no way at all.
    """
    if has_rank_table:
        if Way.TWO_SIDED not in module.ways:
            reason = "there are no NPUs here" if module.name == "host" else "this CANN release cannot link by one"
            raise PDConfigError(f"--pd-rank-table: {reason}; leave it out")
        return Way.TWO_SIDED
    if not module.ways:
        raise PDConfigError(
            "data plane: the installed llm_datadist has neither link_clusters with local_comm_res nor link; "
            "install CANN 8.5 or later"
        )
    return module.ways[0]


def build_options(module: DataDistModule, settings: DataPlaneSettings, port: int = 0) -> dict[str, str]:
    """What `LLMDataDist.init` gets. `port`: where this engine listens; 0 on the host implementation: any."""
    config: Any = module.LLMConfig()
    config.device_id = settings.device_index
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = settings.sync_timeout_ms
    if settings.listens or settings.way is Way.HIXL:  # that backend wants an address of both sides; 0: not listening
        config.listen_ip_info = f"{settings.host}:{port}"
    if settings.way is Way.HOST:
        config.ge_options = {OPTION_SECRET: settings.secret_hex, OPTION_TRANSPORT: settings.host_transport}
    elif settings.way is Way.TWO_SIDED:
        config.link_total_time = LINK_TOTAL_S
    else:
        config.local_comm_res = ""  # the package asks its own tools for the device's address
        if settings.way is Way.HIXL:
            config.transfer_backend = "hixl"
    options: dict[str, str] = config.generate_options()
    return options


def start(
    module: DataDistModule,
    engine: DataDist,
    settings: DataPlaneSettings,
    can_bind: Callable[[str, int], bool] = is_free,
) -> int:
    """Initialise the engine; the port that peers dial, 0 where it does not listen.

    Raises:
        PDConfigError: no port is free.
        LLMException: the data plane refused; its message has the status code.
    """
    if not settings.listens or settings.way is Way.HOST:
        engine.init(build_options(module, settings))
        return int(getattr(engine, "listen_port", None) or 0)
    for port in candidates(settings.listen_port, settings.device_index):
        try:
            if not can_bind(settings.host, port):
                continue
        except OSError as error:
            raise PDConfigError(f"--pd-listen: {settings.host} cannot be listened on: {error}") from error
        try:
            engine.init(build_options(module, settings, port))
        except module.LLMException as error:
            # Another rank may have been quicker; the package has no status of its own for that.
            if error.status_code.name != "LLM_FAILED" or can_bind(settings.host, port):
                raise
            logger.info("data plane: port %d was taken meanwhile", port)
            continue
        return port
    raise PDConfigError(
        f"--pd-listen: no free port for the data plane on {settings.host}; name another port to begin at"
    )


def bind_thread(module: DataDistModule, device_index: int) -> None:
    """Make this rank's device the calling thread's; a new thread would work on device 0. Nothing on CPU."""
    if module.name == "host":
        return
    import torch

    npu: Any = getattr(torch, "npu", None)
    if npu is None:
        raise PDConfigError("data plane: torch has no torch.npu: torch_npu is not imported")
    npu.set_device(device_index)


def link_reserve_bytes(module: DataDistModule, num_links: int) -> int:
    """Device memory that so many links take, for whoever sizes the KV cache. An estimate from published figures."""
    return 0 if module.name == "host" else num_links * LINK_RESERVE_BYTES + TABLE_RESERVE_BYTES
