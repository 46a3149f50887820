# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler half: one per engine core, owns the control server and the half for its role."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.control.server import ControlServer, Reply
from vllm_ascend_pd.datadist import bind_first, describe_data_plane, load
from vllm_ascend_pd.engine.caches import describe_groups
from vllm_ascend_pd.engine.decode import DecodeHalf
from vllm_ascend_pd.engine.prefill import PrefillHalf
from vllm_ascend_pd.engine.stats import StatsRecorder
from vllm_ascend_pd.handshake import build_record
from vllm_ascend_pd.plan.layout import layout_fingerprint, layout_record
from vllm_ascend_pd.secret import Secret, load_secret
from vllm_ascend_pd.transfer.lease import LeaseTable
from vllm_ascend_pd.transfer.peers import PeerTable
from vllm_ascend_pd.wire import (
    CancelTransfer,
    ComputeLocally,
    ConnectPeer,
    DeliverHandoff,
    HealthQuery,
    HealthReply,
    Hello,
    LeaseRelease,
    LeaseRenew,
    RankAddress,
    StatusQuery,
    StatusReply,
)

logger = logging.getLogger(__name__)

HOLD_POLL_S = 0.05
STUCK_S = 10.0  # a supervised thread without a heartbeat for this long is reported


def secret_of(config: PDConfig) -> Secret:
    """The deployment's secret, as this instance was told."""
    return load_secret(Path(config.secret_file) if config.secret_file else None)


class SchedulerHalf:
    """Everything of PD that lives beside the scheduler."""

    def __init__(self, config: PDConfig, vllm_config: Any, kv_cache_config: Any) -> None:
        self.config = config
        self.stats = StatsRecorder()
        self._worker_problems: dict[int, list[str]] = {}  # by rank, as of the last step
        self._links: dict[int, list[dict[str, Any]]] = {}  # decode: rank -> its links, as of the last step
        self._pool: Any = None
        self.count_requests: Callable[[], int] | None = None  # of the scheduler, unfinished ones; any thread
        self.is_in_process = True  # no engine core process: until somebody says how to wake one
        secret = secret_of(config)
        groups = describe_groups(kv_cache_config)
        self._module = load()
        data_plane = describe_data_plane(self._module, config.rank_table)
        record = build_record(vllm_config, config, {"groups": layout_record(groups)}, data_plane)
        self._record = record
        num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self.prefill: PrefillHalf | None = None
        self.decode: DecodeHalf | None = None
        handlers: dict[type, Callable[[Any, Reply], object]] = {
            StatusQuery: lambda _, reply: reply.send(StatusReply(status=self.status())),
            HealthQuery: lambda _, reply: reply.send(HealthReply(problems=self.problems())),
        }
        if config.role is PDRole.PREFILL:
            leases = LeaseTable(lease_s=config.lease_s)
            self.prefill = half = PrefillHalf(
                config, secret, record, layout_fingerprint(groups), num_ranks, leases, self.stats
            )
            handlers |= {
                Hello: half.on_hello,
                LeaseRenew: half.on_renew,
                LeaseRelease: half.on_release,
                CancelTransfer: half.on_cancel,
            }
        else:
            peers = PeerTable(
                config.engine_id, config.epoch, record, secret, num_ranks, lambda p: decode.peer_replaced(p)
            )
            self.decode = decode = DecodeHalf(config, secret, groups, num_ranks, peers, self.stats)
            handlers |= {
                DeliverHandoff: decode.on_deliver,
                ComputeLocally: decode.on_compute_locally,
                ConnectPeer: decode.on_connect,
            }
        self.server = self._start_server(handlers, secret)

    def _start_server(self, handlers: Mapping[type, Callable[[Any, Reply], object]], secret: Secret) -> ControlServer:
        host, port = self.config.listen_host, self.config.listen_port
        literal = f"[{host}]" if ":" in host else host

        def serve(peer_endpoint: str | None) -> ControlServer:
            server = ControlServer(self.config.core_address, peer_endpoint, secret, handlers, tick=self._tick)
            server.start()
            return server

        if self.prefill is None:
            return serve(None)
        if port or self._module.name == "host":
            server = serve(f"tcp://{literal}:{port or '*'}")
        else:  # away from CANN's ports
            server = bind_first(lambda port: serve(f"tcp://{literal}:{port}"), host)
        self.prefill.peer_port = server.peer_port
        logger.info("pd prefill: control address %s:%d", self.config.advertise_host, server.peer_port)
        return server

    def _tick(self) -> float | None:
        return self.prefill.tick() if self.prefill is not None else None

    # ---------------------------------------------------------------- engine thread

    def bind_pool(self, pool: Any) -> None:
        """The scheduler's block pool."""
        self._pool = pool
        if self.prefill is not None:
            self.prefill.bind_pool(pool)

    def set_ranks(
        self,
        ranks: tuple[RankAddress, ...],
        caches: Sequence[Sequence[dict[str, Any]]] = (),
        kv_layouts: Sequence[str] = (),
    ) -> None:
        """Where the worker ranks serve their caches (prefill), and how each has ordered them (both roles).

        The order goes into the handshake's record: one entry where all ranks are alike. So does the layout inside a
        block, which this process does not know where the workers are others.
        """
        if kv_layouts:
            self._record["kv_layout"] = "+".join(sorted(set(kv_layouts)))
        alike = all(record == caches[0] for record in caches)
        self._record["layout"]["caches"] = list(caches[:1] if alike else caches)
        if self.prefill is not None:
            self.prefill.ranks = ranks

    def set_wake(self, wake: Callable[[], None]) -> None:
        """How to make an idle engine thread call `drain`."""
        half = self.prefill or self.decode
        assert half is not None
        half.wake = wake
        self.is_in_process = False

    def note_workers(self, metas: Iterable[Any]) -> None:
        """What the ranks say of themselves with a step. New dicts: the control thread reads the old ones."""
        for meta in metas:
            self._worker_problems = {**self._worker_problems, **meta.problems}
            self._links = {**self._links, **meta.links}

    def drain(self) -> None:
        """Take in what other threads left; called on the engine thread."""
        if self.prefill is not None:
            self.prefill.free_ended()
        if self.decode is not None:
            self.decode.drain()

    # ---------------------------------------------------------------- control thread

    def hold_leases(self) -> None:
        """At shutdown: let readers finish, at most for one lease term. The control thread goes on answering."""
        if self.prefill is None:
            return
        until = time.monotonic() + self.config.lease_s
        if held := self.prefill.leases.counts()["held"]:
            logger.info("pd shutdown: waiting for %d leases", held)
        while self.prefill.leases.counts()["held"] and time.monotonic() < until:
            time.sleep(HOLD_POLL_S)

    def problems(self) -> tuple[str, ...]:
        """Sentences for /health: supervised threads that are dead or stuck."""
        found = [sentence for sentences in self._worker_problems.values() for sentence in sentences]
        if self.decode is not None:
            peers = self.decode.peers
            if not peers.alive():
                found.append("thread pd-peers has died")
            elif time.monotonic() - peers.last_beat > STUCK_S * 3:
                found.append(f"thread pd-peers has given no sign for {STUCK_S * 3:.0f} s")
        return tuple(found)

    def status(self) -> dict[str, Any]:
        """This engine core's part of /pd/status."""
        status: dict[str, Any] = {
            "role": self.config.role.value,
            "engine_id": self.config.engine_id,
            "epoch": self.config.epoch,
            "totals": self.stats.totals(),
        }
        if self.count_requests is not None:
            status["requests"] = {"unfinished": self.count_requests()}
        if self._pool is not None:
            status["blocks"] = {
                "total": int(self._pool.num_gpu_blocks),
                "free": int(self._pool.get_num_free_blocks()),
            }
        if self.prefill is not None:
            status["control"] = {
                "host": self.config.advertise_host,
                "port": self.prefill.peer_port,
            }
            status["leases"] = self.prefill.leases.counts()
            status["peers"] = [
                {"engine_id": engine, "epoch": epoch} for engine, epoch in self.prefill.seen_peers.items()
            ]
            status["links"] = [{"tp_rank": r.tp_rank, "host": r.host, "port": r.port} for r in self.prefill.ranks]
        if self.decode is not None:
            status["transfers_in_flight"] = self.decode.loads.counts()
            status["peers"] = [
                {"engine_id": p.engine_id, "epoch": p.epoch, "host": p.host, "port": p.port}
                for p in self.decode.peers.peers()
            ]
            status["links"] = self._describe_links(self.decode.peers)
        return status

    def _describe_links(self, peers: PeerTable) -> list[dict[str, Any]]:
        """Data links of our ranks, made and not dropped; those of a peer that has been replaced by cluster id only."""
        known = {rank.cluster_id: (peer, rank) for peer in peers.peers() for rank in peer.ranks}
        links: list[dict[str, Any]] = []
        for tp_rank, told in sorted(self._links.items()):
            for link in told:
                links.append({"tp_rank": tp_rank, **link})
                if link["cluster_id"] in known:
                    peer, rank = known[link["cluster_id"]]
                    links[-1] |= {"engine_id": peer.engine_id, "host": rank.host, "port": rank.port}
        return links

    def close(self) -> None:
        """Stop the threads."""
        self.server.close()
        if self.decode is not None:
            self.decode.peers.close()
