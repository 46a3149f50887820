# SPDX-License-Identifier: Apache-2.0
"""The connector's worker half: registers the KV caches with datadist and, on decode, pulls.

Runs in every worker rank's process. The prefill side listens and otherwise does nothing; the decode side's work is
in the pull threads (`transfer/puller.py`).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_ascend_pd import datadist
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.engine.caches import describe_caches, describe_groups
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.plan.layout import CacheLayout, caches_record, fingerprint
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.choice import WayChooser
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.links import LinkTable
from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.moving import Caches
from vllm_ascend_pd.transfer.puller import PullContext, PullWorkers
from vllm_ascend_pd.transfer.staging.buffer import StagingBuffer
from vllm_ascend_pd.transfer.staging.chunks import SLOT_BYTES, can_stage
from vllm_ascend_pd.transfer.staging.copier import HostCopier
from vllm_ascend_pd.transfer.staging.puller import StagedPuller
from vllm_ascend_pd.transfer.staging.server import StageServer
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask
from vllm_ascend_pd.wire import RankAddress

logger = logging.getLogger(__name__)

PREFILL_SLOTS = 4  # many decode ranks read from one prefill rank
DECODE_SLOTS = 2  # one for each pull thread


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
        self._ways: WayChooser | None = None
        self._stage_server: StageServer | None = None
        self._link_lock = threading.Lock()
        self._link_news: deque[list[dict[str, Any]]] = deque(maxlen=1)
        self._posted_s: dict[str, float] = {}  # request id -> what posting its pull took of the step
        self._told_problems: list[str] = []
        self.address: RankAddress | None = None
        self.caches_record: list[dict[str, Any]] = []  # for the handshake

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register every region once and come up: listening (prefill) or ready to link (decode).

        Raises:
            PDConfigError: a cache layout that cannot be handed over.
            LLMException: the data plane refused; its message has the status code.
        """
        layout = describe_caches(kv_caches, self._num_blocks, self._groups)
        self.caches_record = caches_record(layout, self._groups)
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
        staging = self._make_staging(layout, is_prefill)
        if staging is not None:
            staging.register(module, manager, cluster_id)
        if is_prefill:
            if staging is not None:
                self._stage_server = self._serve_staging(staging, layout, host)
        else:
            groups = [group.layers for group in self._groups]
            self._pulls = PullWorkers(self._context(Caches(layout, groups, caches, manager, module), staging, host))
        self.address = RankAddress(
            tp_rank=self._rank,
            cluster_id=cluster_id,
            host=host,
            port=datadist.listening_port(engine) or 0,
            stage_port=self._stage_server.port if self._stage_server is not None else 0,
            caches=fingerprint(self.caches_record),
        )
        logger.info(
            "pd rank=%d data plane=%s registered %d regions in %d caches, %d blocks",
            self._rank,
            module.name,
            layout.num_regions(),
            len(layout.caches),
            self._num_blocks,
        )

    def submit(self, task: PullTask | DropPeer) -> None:
        """Queue what the scheduler half wants; returns at once."""
        assert self._pulls is not None
        started = time.monotonic()
        self._pulls.submit(task)
        if isinstance(task, PullTask):
            self._posted_s[task.request_id] = time.monotonic() - started

    def take_results(self) -> list[RankResult]:
        """Answers of finished tasks; never blocks."""
        if self._pulls is None:
            return []
        return [
            replace(answer, seconds={**answer.seconds, "post": self._posted_s.pop(answer.request_id, 0.0)})
            for answer in self._pulls.take_answers()
        ]

    def take_links(self) -> dict[int, list[dict[str, Any]]]:
        """This rank's links, by its rank, when anything about them has changed since the last call."""
        try:
            return {self._rank: self._link_news.pop()}
        except IndexError:
            return {}

    def _note_links(self) -> None:
        """Pull threads: describing every link takes a step too long."""
        links, ways = self._links, self._ways
        assert links is not None
        assert ways is not None
        with self._link_lock:  # the last one to look is the last one to tell
            self._link_news.append([{"cluster_id": i, **self._describe_link(i, ways)} for i in links.cluster_ids])

    def _describe_link(self, cluster_id: int, ways: WayChooser) -> dict[str, Any]:
        try:
            transport = datadist.link_transport(self._datadist, cluster_id)
            counts = datadist.link_counts(self._datadist, cluster_id)
        except Exception:  # spoilt or dropped meanwhile: the next pull makes it anew
            return {"transport": "none", "transfer": ways.describe(cluster_id)}
        return {"transport": transport, "transfer": ways.describe(cluster_id), "wire": counts}

    def take_problems(self) -> dict[int, list[str]]:
        """Sentences for /health by this rank, when they have changed since the last call."""
        names = self._pulls.find_problems() if self._pulls is not None else []
        names += self._stage_server.problems() if self._stage_server is not None else []
        found = [f"{name} of worker rank {self._rank}" for name in names]
        if found == self._told_problems:
            return {}
        self._told_problems = found
        return {self._rank: found}

    def close(self) -> None:
        """Stop pulling, unlink, release."""
        if self._pulls is not None:
            self._pulls.close()
        if self._stage_server is not None:
            self._stage_server.close()
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

    def _make_staging(self, layout: CacheLayout, is_prefill: bool) -> StagingBuffer | None:
        """Before the first link: what is registered later cannot be reached over it."""
        if self._config.transfer == "straight":
            return None
        if not can_stage(layout):
            if self._config.transfer == "staged":
                raise PDConfigError(f"--pd-transfer staged: a KV block of a layer is larger than {SLOT_BYTES} bytes")
            return None
        return StagingBuffer(PREFILL_SLOTS if is_prefill else DECODE_SLOTS, len(layout.caches))

    def _serve_staging(self, staging: StagingBuffer, layout: CacheLayout, host: str) -> StageServer:
        path = f"{self._config.runtime_dir}/stage{self._rank}.sock"
        secret = self._secret
        return StageServer(staging, layout, HostCopier(), secret, path, host)

    def _context(self, caches: Caches, staging: StagingBuffer | None, host: str) -> PullContext:
        module, clients = caches.module, ClientTable(self._secret)
        staged = None
        if staging is not None:
            staged = StagedPuller(staging, caches.layout, HostCopier(), caches.manager, module)
        self._ways = WayChooser(self._config.transfer, staged, clients, module.LLMException)
        self._links = LinkTable(self._datadist, module, host, self._ways)
        return PullContext(
            rank=self._rank,
            num_ranks=self._num_ranks,
            caches=caches,
            caches_hash=fingerprint(self.caches_record),
            links=self._links,
            ways=self._ways,
            clients=clients,
            links_changed=self._note_links,
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
