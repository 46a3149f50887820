# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's requests and for the peers of a decode engine core."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.engine.decode import DecodeHalf
from vllm_ascend_pd.engine.stats import StatsRecorder
from vllm_ascend_pd.handoff import prompt_digest, sign_handoff, to_kv_transfer_params
from vllm_ascend_pd.plan.layout import CacheGroup, layout_fingerprint
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.peers import Peer
from vllm_ascend_pd.wire import ComputeLocally, DeliverHandoff, Handoff, LoadResult, RankAddress

SECRET = Secret(b"the secret of a deployment")
BLOCK = 16
GROUPS = (CacheGroup("full", BLOCK, ("l0", "l1"), 2, 64, "float32", 4096),)
PROMPT = tuple(range(100, 140))  # 40 tokens: two whole blocks and a half
RANKS = (RankAddress(tp_rank=0, cluster_id=10, host="127.0.0.1", port=1),)


def make_config(role: PDRole = PDRole.DECODE, **values) -> PDConfig:
    return PDConfig(role=role, engine_id=f"pd-{role.value}", epoch="e0", runtime_dir="/run/pd", **values)


def make_request(request_id: str = "r", params=None, prompt=PROMPT, **values) -> SimpleNamespace:
    """What of a scheduler's Request is read."""
    values = {"status": SimpleNamespace(name="WAITING"), **values}
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        prompt_token_ids=None if prompt is None else list(prompt),
        num_prompt_tokens=0 if prompt is None else len(prompt),
        prompt_embeds=None,
        mm_features=[],
        lora_request=None,
        pooling_params=None,
        sampling_params=SimpleNamespace(prompt_logprobs=None),
        **values,
    )


def watched(**values) -> dict:
    """The params that an API server of ours gives to a request."""
    return {"do_remote_prefill": True, "pd_wait": True, "pd_deadline_ms": 5000, **values}


def make_handoff(transfer_id: str = "t1", prompt=PROMPT, secret: Secret = SECRET, **values) -> Handoff:
    values = {"block_ids": ((5, 6, 7),), "layout": layout_fingerprint(GROUPS), "engine_id": "p", **values}
    handoff = Handoff(
        transfer_id=transfer_id, lease_id=f"lease-{transfer_id}", epoch="ep", host="127.0.0.1", port=9,
        num_tokens=len(prompt), prompt_digest=prompt_digest(prompt), lease_ms=30000, **values,
    )  # fmt: skip
    return sign_handoff(handoff, secret)


def inline_params(handoff: Handoff | None) -> dict:
    """Two-phase by hand: what a client carries from P to D."""
    return {"do_remote_prefill": True} if handoff is None else to_kv_transfer_params(handoff, "p-request", 1)


class FakePeers:
    """A PeerTable whose handshakes happen when the test says so."""

    def __init__(self) -> None:
        self.is_known = True
        self.given_back: list[tuple[str, bool]] = []
        self.waiting: list = []

    def known(self, handoff: Handoff) -> Peer | None:
        if not self.is_known:
            return None
        return Peer(handoff.engine_id, handoff.epoch, handoff.host, handoff.port, RANKS)

    def resolve(self, handoff: Handoff, done) -> None:
        if self.is_known:
            done(self.known(handoff), "")
        else:
            self.waiting.append(done)

    def give_back(self, handoff: Handoff, moved: bool) -> None:
        self.given_back.append((handoff.transfer_id, moved))


class Decode:
    """A DecodeHalf with its clock, its peers, and what the API server was told."""

    def __init__(self, num_ranks: int = 1, **values) -> None:
        self.now = 0.0
        self.peers = FakePeers()
        self.stats = StatsRecorder()
        self.answers: list[tuple[str, str]] = []
        self.half = DecodeHalf(
            make_config(**values), SECRET, GROUPS, num_ranks, self.peers, self.stats, lambda: self.now
        )

    def new(self, request_id: str = "r", params=None, **values) -> SimpleNamespace:
        request = make_request(request_id, watched() if params is None else params, **values)
        self.half.new_request(request)
        return request

    def deliver(self, handoff: Handoff | None = None, request_id: str = "r") -> None:
        message = DeliverHandoff(request_id=request_id, handoff=handoff or make_handoff(), deadline_ms=5000)
        self.half.on_deliver(message, SimpleNamespace(send=self._note))
        self.half.drain()

    def _note(self, result: LoadResult) -> None:
        self.answers.append((result.outcome, result.reason))

    def compute_locally(self, request_id: str = "r", reason: str = "deadline") -> None:
        message = ComputeLocally(request_id=request_id, reason=reason)
        self.half.on_compute_locally(message, SimpleNamespace(send=lambda _: None))
        self.half.drain()

    def admit(self, request: SimpleNamespace, cached: int = 0, blocks=((1, 2, 3),)) -> int:
        """As the scheduler does: asks, allocates, tells. Returns the tokens that are to come."""
        count, is_async = self.half.external_tokens(request, cached)
        assert is_async == (count > 0)
        self.half.blocks_allocated(request, blocks, count)
        return count

    def results(
        self, *ranks: int, ok: bool = True, transfer_id: str = "t1", request_id: str = "r", reason="lease_expired"
    ):
        return self.half.step_ended(
            [RankResult(request_id, transfer_id, rank, ok, "" if ok else reason, 100) for rank in ranks]
        )
