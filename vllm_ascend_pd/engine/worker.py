# SPDX-License-Identifier: Apache-2.0
"""The connector's worker half: registers the KV caches with datadist and, on decode, pulls.

Runs in every worker rank's process. The prefill side listens and otherwise does nothing; the decode side's work is
in the pull threads (`transfer/puller.py`).
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd import datadist
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.engine.caches import describe_groups, describe_regions, region_layers
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.plan.layout import CacheLayout
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.links import LinkTable
from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.puller import PullContext, PullWorkers
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask
from vllm_ascend_pd.wire import RankAddress

logger = logging.getLogger(__name__)


class WorkerHalf:
    """One rank's data plane."""

    def __init__(self, config: PDConfig, secret: Secret, kv_cache_config: Any, rank: int, num_ranks: int) -> None:
        self._config = config
        self._secret = secret
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._groups = describe_groups(kv_cache_config)
        self._datadist: Any = None
        self._pulls: PullWorkers | None = None
        self._links: LinkTable | None = None
        self._told_links: list[int] = []
        self._told_problems: list[str] = []
        self.address: RankAddress | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register every region once and come up: listening (prefill) or ready to link (decode).

        Raises:
            PDConfigError: a cache layout that cannot be handed over.
            LLMException: the data plane refused; its message has the status code.
        """
        layout = describe_regions(kv_caches, self._num_blocks)
        module = datadist.load()
        is_prefill = self._config.role is PDRole.PREFILL
        cluster_id = secrets.randbits(63)
        host = _ipv4(self._config.advertise_host if is_prefill else self._config.listen_host)
        engine = module.LLMDataDist(module.LLMRole.PROMPT if is_prefill else module.LLMRole.DECODER, cluster_id)
        engine.init(self._options(module, host if is_prefill else ""))
        manager = engine.cache_manager
        caches = [
            manager.register_blocks_cache(
                module.CacheDesc(
                    len(regions), [regions[0].num_blocks, regions[0].block_bytes], module.DataType.DT_UINT8
                ),
                [region.address for region in regions],
                module.BlocksCacheKey(cluster_id, model_id),
                remote_accessible=True,
            )
            for model_id, regions in enumerate(layout.caches)
        ]
        self._datadist = engine
        if is_prefill:
            self.address = RankAddress(
                tp_rank=self._rank,
                cluster_id=cluster_id,
                host=host,
                port=datadist.listening_port(engine) or 0,
            )
        else:
            self._pulls = PullWorkers(self._context(module, layout, caches, manager, host))
        logger.info(
            "pd rank=%d data plane=%s registered %d regions in %d caches, %d blocks",
            self._rank,
            module.name,
            sum(map(len, layout.caches)),
            len(layout.caches),
            self._num_blocks,
        )

    def submit(self, task: PullTask | DropPeer) -> None:
        """Queue what the scheduler half wants; returns at once."""
        assert self._pulls is not None
        self._pulls.submit(task)

    def take_results(self) -> list[RankResult]:
        """Answers of finished tasks; never blocks."""
        return self._pulls.take_answers() if self._pulls is not None else []

    def take_links(self) -> dict[int, list[int]]:
        """The cluster ids that this rank is linked with, by its rank, when they have changed since the last call."""
        linked = self._links.cluster_ids if self._links is not None else []
        if linked == self._told_links:
            return {}
        self._told_links = linked
        return {self._rank: linked}

    def take_problems(self) -> dict[int, list[str]]:
        """Sentences for /health by this rank, when they have changed since the last call."""
        pulls = self._pulls
        found = [] if pulls is None else [f"{name} of worker rank {self._rank}" for name in pulls.find_problems()]
        if found == self._told_problems:
            return {}
        self._told_problems = found
        return {self._rank: found}

    def close(self) -> None:
        """Stop pulling, unlink, release."""
        if self._pulls is not None:
            self._pulls.close()
        if self._datadist is not None:
            self._datadist.finalize()
            self._datadist = None

    def _options(self, module: Any, listen_host: str) -> dict[str, str]:
        options = module.LLMConfig()
        options.device_id = 0
        options.enable_cache_manager = True
        options.enable_remote_cache_accessible = True
        options.sync_kv_timeout = max(1000, self._config.deadline_ms // 2)
        if listen_host:
            options.listen_ip_info = f"{listen_host}:0"
        if module.name == "host":
            options.ge_options = {
                "pd.host.secret": self._secret.derive("datadist").hex(),
                "pd.host.transport": self._config.host_transport,
            }
        result: dict[str, str] = options.generate_options()
        return result

    def _context(self, module: Any, layout: CacheLayout, caches: list[Any], manager: Any, host: str) -> PullContext:
        self._links = LinkTable(self._datadist, module, host)
        return PullContext(
            rank=self._rank,
            num_ranks=self._num_ranks,
            reader=self._config.epoch,
            layout=layout,
            group_layers=[region_layers(layout, group.layers) for group in self._groups],
            caches=caches,
            manager=manager,
            links=self._links,
            module=module,
            clients=ClientTable(self._secret),
        )


def _ipv4(host: str) -> str:
    """llm_datadist takes numeric IPv4 addresses only (reference: `LLMClusterInfo`).

    Raises:
        PDConfigError: a host that has none.
    """
    if host in ("::1", "localhost"):
        return "127.0.0.1"
    try:
        info = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise PDConfigError(
            f"--pd-listen: {host} has no IPv4 address, and the data plane of this release needs one: {error}"
        ) from error
    return str(info[0][4][0])
