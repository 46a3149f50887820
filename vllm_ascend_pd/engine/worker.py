# SPDX-License-Identifier: Apache-2.0
"""The connector's worker half: registers the KV caches with datadist and, on decode, pulls.

Runs in every worker rank's process. The prefill side listens and otherwise does nothing; the decode side's work is
in the pull threads (`transfer/puller.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from vllm_ascend_pd import datadist
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.engine.caches import check_regions, describe_caches, describe_groups, find_device
from vllm_ascend_pd.engine.plane import DataPlane, start_plane
from vllm_ascend_pd.engine.staging import Staging, make_staging
from vllm_ascend_pd.npu.order import HostOrder, Order, make_order
from vllm_ascend_pd.plan.layout import CacheLayout, caches_record, fingerprint
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.choice import WayChooser
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.linking import Asker, make_linker
from vllm_ascend_pd.transfer.links import LinkTable
from vllm_ascend_pd.transfer.linkserver import LinkServer
from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.moving import Caches
from vllm_ascend_pd.transfer.puller import PullContext, PullWorkers
from vllm_ascend_pd.transfer.staging.puller import StagedPuller
from vllm_ascend_pd.transfer.staging.server import StageServer
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask
from vllm_ascend_pd.wire import RankAddress

logger = logging.getLogger(__name__)

Served = TypeVar("Served", StageServer, LinkServer)


class WorkerHalf:
    """One rank's data plane."""

    def __init__(
        self,
        config: PDConfig,
        secret: Secret,
        kv_cache_config: Any,
        rank: int,
        num_ranks: int,
        *,
        takes_host_plane: bool = False,
    ) -> None:
        """`takes_host_plane`: even for caches on a device, of which it reaches only what is staged (tests)."""
        self._takes_host_plane = takes_host_plane
        self._config = config
        self._secret = secret
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._groups = describe_groups(kv_cache_config)
        self._plane: DataPlane | None = None
        self._order: Order = HostOrder()
        self._pulls: PullWorkers | None = None
        self._links: LinkTable | None = None
        self._ways: WayChooser | None = None
        self._stage_server: StageServer | None = None
        self._link_server: LinkServer | None = None
        self._link_lock = threading.Lock()
        self._link_news: deque[list[dict[str, Any]]] = deque(maxlen=1)
        self._posted_s: dict[str, float] = {}  # request id -> what posting its pull took of the step
        self._told_problems: list[str] = []
        self.address: RankAddress | None = None
        self.caches_record: list[dict[str, Any]] = []  # for the handshake

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register every region once and come up: listening (prefill) or ready to link (decode).

        Raises:
            PDConfigError: a cache layout that cannot be handed over, or no data plane for the caches' device.
            LLMException: the data plane refused; its message has the status code.
        """
        layout = describe_caches(kv_caches, self._num_blocks, self._groups)
        self.caches_record = caches_record(layout, self._groups)
        device = find_device(kv_caches)
        check_regions(layout, self._groups, is_device=device.type != "cpu")
        if device.type != "cpu" and not self._takes_host_plane:
            datadist.require_cann(str(device))
        self._order = make_order(device)
        self._plane = plane = start_plane(self._config, self._secret, device.index or 0)
        caches = plane.register(layout)
        staging = make_staging(self._config, layout, kv_caches, self._order, device)
        if staging is not None:
            staging.buffer.register(plane.module, plane.manager, plane.cluster_id)
        if self._config.role is PDRole.PREFILL:
            self._serve(plane, layout, staging)
        else:
            groups = [group.layers for group in self._groups]
            caches_here = Caches(layout, groups, caches, plane.manager, plane.module)
            self._pulls = PullWorkers(self._context(plane, caches_here, staging))
        self.address = RankAddress(
            tp_rank=self._rank,
            cluster_id=plane.cluster_id,
            host=plane.host,
            port=plane.port,
            stage_port=self._stage_server.port if self._stage_server is not None else 0,
            link_port=self._link_server.port if self._link_server is not None else 0,
            caches=fingerprint(self.caches_record),
            device=plane.device,
        )
        logger.info(
            "pd rank=%d data plane=%s (%s) device=%s registered %d regions in %d caches, %d blocks",
            self._rank,
            plane.module.name,
            plane.way.value,
            device,
            layout.num_regions(),
            len(layout.caches),
            self._num_blocks,
        )

    def submit(self, task: PullTask | DropPeer) -> None:
        """Queue what the scheduler half wants; returns at once."""
        assert self._pulls is not None
        started = time.monotonic()
        self._order.mark()  # nothing that is launched later touches the blocks that the pull will write
        self._pulls.submit(task)
        if isinstance(task, PullTask):
            self._posted_s[task.request_id] = time.monotonic() - started

    def step_launched(self) -> None:
        """After the last write of a step's forward pass was queued; never waits for the device."""
        if self._stage_server is not None:
            self._order.mark()

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
        assert self._plane is not None
        try:
            transport = datadist.link_transport(self._plane.engine, cluster_id)
            counts = datadist.link_counts(self._plane.engine, cluster_id)
        except Exception:  # spoilt or dropped meanwhile: the next pull makes it anew
            return {"transport": "none", "transfer": ways.describe(cluster_id)}
        return {"transport": transport, "transfer": ways.describe(cluster_id), "wire": counts}

    def take_problems(self) -> dict[int, list[str]]:
        """Sentences for /health by this rank, when they have changed since the last call."""
        names = self._pulls.find_problems() if self._pulls is not None else []
        for server in (self._stage_server, self._link_server):
            names += server.problems() if server is not None else []
        found = [f"{name} of worker rank {self._rank}" for name in names]
        if found == self._told_problems:
            return {}
        self._told_problems = found
        return {self._rank: found}

    def close(self) -> None:
        """Stop pulling, unlink, release."""
        if self._pulls is not None:
            self._pulls.close()
        for server in (self._stage_server, self._link_server):
            if server is not None:
                server.close()
        if self._plane is not None:
            self._plane.engine.finalize()
            self._plane = None

    def _serve(self, plane: DataPlane, layout: CacheLayout, staging: Staging | None) -> None:
        """Prefill: what decode ranks ask this rank for. On a device, at ports that CANN does not take."""
        folder, host = self._config.runtime_dir, plane.host
        on_device = plane.module.name != "host"
        first = plane.device.physical_id if plane.device is not None else plane.device_index  # ranks look apart

        def serve_stage(port: int) -> StageServer:
            assert staging is not None
            endpoint = (f"{folder}/stage{self._rank}.sock", host, port)
            return StageServer(staging.buffer, layout, staging.copier, self._secret, endpoint)

        def serve_links(port: int) -> LinkServer:
            endpoint = (f"{folder}/link{self._rank}.sock", host, port)
            bind_thread = self._order.bind_thread
            return LinkServer(plane.engine, plane.module, plane.way, plane.device, self._secret, endpoint, bind_thread)

        def find_port(serve: Callable[[int], Served]) -> Served:
            return datadist.bind_first(serve, host, self._config.listen_port, first)

        if staging is not None:
            self._stage_server = find_port(serve_stage) if on_device else serve_stage(0)
        if on_device:
            self._link_server = find_port(serve_links)

    def _context(self, plane: DataPlane, caches: Caches, staging: Staging | None) -> PullContext:
        module, clients = plane.module, ClientTable(self._secret)
        staged = None
        if staging is not None:
            staged = StagedPuller(staging.buffer, caches.layout, staging.copier, caches.manager, module)
        asker = Asker(clients, plane.way, plane.cluster_id, plane.device)
        linker = make_linker(plane.engine, module, plane.host, asker)
        self._ways = WayChooser(self._config.transfer, staged, clients, module.LLMException)
        self._links = LinkTable(plane.engine, module, plane.host, self._ways, linker)
        return PullContext(
            rank=self._rank,
            num_ranks=self._num_ranks,
            caches=caches,
            caches_hash=fingerprint(self.caches_record),
            links=self._links,
            ways=self._ways,
            clients=clients,
            links_changed=self._note_links,
            bind_thread=self._order.bind_thread,
            settle=self._order.wait,
        )
