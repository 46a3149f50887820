# SPDX-License-Identifier: Apache-2.0
"""What a rank's pull threads talk to: datadist, control clients, the time."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_ascend_pd.datadist.status import LLMStatusCode
from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.plan.layout import Region, build_layout
from vllm_ascend_pd.transfer import puller
from vllm_ascend_pd.transfer.choice import WayChooser
from vllm_ascend_pd.transfer.links import LinkTable
from vllm_ascend_pd.transfer.moving import Caches
from vllm_ascend_pd.transfer.puller import PullContext, PullWorkers
from vllm_ascend_pd.transfer.tasks import PullTask
from vllm_ascend_pd.wire import LeaseVerdict, RankAddress

BLOCK_BYTES = 1024
NUM_LAYERS = 4
CACHES_HASH = "order"
HELD = LeaseVerdict(held=True, state="held", remaining_ms=30000)


class LLMException(Exception):
    def __init__(self, status_code: str) -> None:
        super().__init__(status_code)
        self.status_code = LLMStatusCode[f"LLM_{status_code}"]


class ClusterInfo:
    """LLMClusterInfo."""

    def append_local_ip_info(self, host: str, port: int) -> None:
        pass

    def append_remote_ip_info(self, host: str, port: int) -> None:
        pass


MODULE = SimpleNamespace(
    LLMException=LLMException,
    LLMStatusCode=LLMStatusCode,
    LLMClusterInfo=ClusterInfo,
    BlocksCacheKey=lambda cluster_id, model_id: (cluster_id, model_id),
)


class Datadist:
    """Links and pulls; `link_codes`, `unlink_codes` and `pull_errors` are used up from the front."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.link_codes: list = []
        self.unlink_codes: list = []
        self.pull_errors: list = []
        self.before_pull = lambda: None

    def link_clusters(self, clusters, timeout_ms: int):
        self.calls.append(("link", clusters[0].remote_cluster_id))
        code = self.link_codes.pop(0) if self.link_codes else "SUCCESS"
        if isinstance(code, Exception):
            raise code
        status = LLMStatusCode[f"LLM_{code}"]
        return status, [status]

    def unlink_clusters(self, clusters, timeout_ms: int, force: bool):
        assert force, "the other side may be gone"
        self.calls.append(("unlink", clusters[0].remote_cluster_id))
        status = LLMStatusCode[f"LLM_{self.unlink_codes.pop(0) if self.unlink_codes else 'SUCCESS'}"]
        return status, [status]

    def pull_blocks(self, key, cache, src, dst, src_layer_range, dst_layer_range, tensor_num_per_layer) -> None:
        assert src_layer_range == dst_layer_range
        assert tensor_num_per_layer == 1
        self.before_pull()
        error = self.pull_errors.pop(0) if self.pull_errors else None
        if error is not None:
            raise error
        self.calls.append(("pull", key, tuple(src), tuple(dst), src_layer_range))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Clients:
    """A ClientTable; `answers` is used up from the front, then every lease is held."""

    def __init__(self) -> None:
        self.asked: list = []
        self.answers: list = []
        self.silent_at = -1.0
        self.closed = False

    def get(self, host: str, port: int) -> Clients:
        return self

    def request(self, message, timeout_s: float, attempts: int):
        self.asked.append(message)
        answer = self.answers.pop(0) if self.answers else HELD
        if isinstance(answer, Exception):
            raise answer
        return answer

    def note_silence(self, host: str, port: int) -> None:
        self.silent_at = puller.time.monotonic()

    def was_silent_since(self, host: str, port: int, moment: float) -> bool:
        return self.silent_at > moment

    def close(self) -> None:
        self.closed = True

    def kinds(self) -> list[type]:
        return [type(message) for message in self.asked]


class Rank:
    """Pull threads with fakes around."""

    def __init__(self, num_threads: int = 1) -> None:
        self.datadist = Datadist()
        self.clients = Clients()
        regions = {f"l{i}": (Region(i * 100 * BLOCK_BYTES, 100, BLOCK_BYTES),) for i in range(NUM_LAYERS)}
        ways = WayChooser("straight", None, self.clients, LLMException)
        self.workers = PullWorkers(
            PullContext(
                rank=0,
                num_ranks=1,
                caches=Caches(
                    build_layout(regions, [list(regions)]), [list(regions)], ["cache"], self.datadist, MODULE
                ),
                caches_hash=CACHES_HASH,
                links=LinkTable(self.datadist, MODULE, "127.0.0.1", ways),
                ways=ways,
                clients=self.clients,
            ),
            num_threads,
        )

    def pull(self, **values):
        self.workers.submit(make_task(**values))
        return self.answer()

    def answer(self):
        return self.workers._answers.get(timeout=10)


def make_task(**values) -> PullTask:
    values = {
        "ranks": (RankAddress(tp_rank=0, cluster_id=7, host="127.0.0.1", port=1, caches=CACHES_HASH),),
        "pulls": (GroupPull(0, (5, 6), (1, 2)),),
        "deadline_s": 30.0,
        "reader": "e0",
        **values,
    }
    return PullTask("r", "t1", "lease1", "127.0.0.1", 9, **values)


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
