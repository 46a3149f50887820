# SPDX-License-Identifier: Apache-2.0
"""Every control message, as msgspec Structs in one tagged union per direction.

Two planes use them. *Local*: an instance's API servers to its own engine core, over a Unix socket in the
instance's private runtime directory. *Peer*: decode instance to prefill instance, over TCP with CURVE keys
derived from the deployment's secret. Nothing on the wire is executable; frames are bounded (`MAX_FRAME_BYTES`).
Every message is idempotent: a repeat gives the same answer.

History of WIRE_VERSION: 1, first light. 2, staging: `RankAddress.stage_port`, StageExtract, StageFree. 3, CANN:
`RankAddress.device` and `link_port`, LinkAsk, LinkEnd.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

WIRE_VERSION: Final = 3
MAX_FRAME_BYTES: Final = 4 << 20


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill instance grants for one finished prompt; travels as `kv_transfer_params`.

    `block_ids[g][i]` is the block of cache group `g` that holds tokens `[i * block_size, (i + 1) * block_size)`;
    0 (the null block) where the group keeps nothing (outside a sliding window).
    """

    transfer_id: str  # engine id / epoch / request / attempt; compared, never parsed
    lease_id: str
    engine_id: str
    epoch: str  # random per process start
    host: str  # control address of the engine core that holds the lease
    port: int
    num_tokens: int  # prompt tokens whose KV is computed and leased
    prompt_digest: str  # hex; binds the handoff to the token ids
    block_ids: tuple[tuple[int, ...], ...]
    layout: str  # fingerprint of the cache layout
    lease_ms: int  # granted when the handoff was signed
    signature: str = ""  # hex HMAC-SHA256 over all other fields


class DeviceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Which NPU a rank runs on, in the terms of a rank table. Read from the system, never typed by anyone.

    The super node's fields are empty on A2.
    """

    server_id: str  # unique per host; the same for all devices of one host
    logical_id: int  # as the process sees it (after ASCEND_RT_VISIBLE_DEVICES and the container's mapping)
    physical_id: int  # as the driver counts: what a rank table needs
    device_ip: str  # of the NPU's own network port (A3 over HCCS: its virtual one)
    super_device_id: str = ""  # SDID
    super_pod_id: str = ""


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker rank of a prefill instance serves its registered caches."""

    tp_rank: int
    cluster_id: int  # uint64, unique per process start
    host: str
    port: int
    stage_port: int = 0  # where this rank's worker answers StageExtract; 0: it has no staging buffer
    caches: str = ""  # fingerprint of the order in which this rank has registered its caches
    device: DeviceAddress | None = None  # None on CPU
    link_port: int = 0  # where this rank's worker answers LinkAsk; 0: its data plane needs no asking (CPU)


# ------------------------------------------------------------------ peer plane: decode -> prefill


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """Compare records before anything moves. Answered by HelloReply or Refused."""

    wire_version: int
    engine_id: str
    epoch: str
    record: dict[str, Any]


class LeaseRenew(msgspec.Struct, tag="lease_renew", frozen=True, kw_only=True):
    """`rank` is about to read; asks that the lease lasts for one more full term. Answered by LeaseVerdict.

    `reader` is the decode engine's epoch. The first one to ask is the only reader: a handoff that a router has given
    to two decode engines is good for one of them.
    """

    lease_id: str
    transfer_id: str
    rank: int
    num_ranks: int
    reader: str = ""


class LeaseRelease(msgspec.Struct, tag="lease_release", frozen=True, kw_only=True):
    """`rank` has read its last byte (or will not read). The lease ends when all `num_ranks` have said so."""

    lease_id: str
    transfer_id: str
    rank: int
    num_ranks: int
    reader: str = ""


class CancelTransfer(msgspec.Struct, tag="cancel", frozen=True, kw_only=True):
    """The request is gone on the decode side: end its lease now, or as soon as it would be made."""

    transfer_id: str


# ------------------------------------------------------------------ peer plane: decode worker -> prefill worker


class StageItem(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the tensors `[start, stop)` of registered cache `model_id`; tensor by tensor, in this order."""

    model_id: int
    start: int
    stop: int
    blocks: tuple[int, ...]


class StageExtract(msgspec.Struct, tag="stage_extract", frozen=True, kw_only=True):
    """Gather leased blocks into the prefill rank's staging buffer. Answered by StageSlot, or Refused (`staging_busy`).

    `extract_id` is new for every extract, and kept when the message is sent again. Without items nothing is gathered:
    the answer only measures the way.
    """

    extract_id: str
    items: tuple[StageItem, ...]
    deadline_ms: int


class StageFree(msgspec.Struct, tag="stage_free", frozen=True, kw_only=True):
    """The slot has been read. Answered by LeaseVerdict: whether it was the reader's until now."""

    extract_id: str


# ------------------------------------------------------------------ peer plane: doctor -> doctor


class DoctorAsk(msgspec.Struct, tag="doctor_ask", frozen=True, kw_only=True):
    """From one `vllm pd doctor` to another; `body` is one of `doctor/peer/messages.py`. Engine cores refuse it."""

    verb: str
    body: dict[str, Any]


class LinkAsk(msgspec.Struct, tag="link_ask", frozen=True, kw_only=True):
    """A decode rank is about to link to this prefill rank. Answered by LinkState, or Refused.

    The prefill side first drops what it still has of an earlier process on the same device. With a rank table it then
    calls `link` too, which both sides have to do at the same time. Asked again with the same `link_id`, it says how
    far it is.
    """

    link_id: str  # new for every try
    way: str
    cluster_id: int  # of the decode rank
    peer_cluster_id: int  # whom it means to ask
    device: DeviceAddress | None = None  # of the decode rank
    table_digest: str = ""  # of the rank table, which both sides build from both devices
    deadline_ms: int = 0


class LinkEnd(msgspec.Struct, tag="link_end", frozen=True, kw_only=True):
    """The decode rank has dropped the link. Answered by Ack."""

    link_id: str


# ------------------------------------------------------------------ local plane: API server -> own engine core


class StatusQuery(msgspec.Struct, tag="status", frozen=True, kw_only=True):
    """Answered by StatusReply."""


class HealthQuery(msgspec.Struct, tag="health", frozen=True, kw_only=True):
    """Answered by HealthReply, from heartbeats; never waits behind a step."""


class ConnectPeer(msgspec.Struct, tag="connect_peer", frozen=True, kw_only=True):
    """Decode only: do the handshake with the prefill instance whose control address this is. Answered by
    ConnectResult."""

    host: str
    port: int


class DeliverHandoff(msgspec.Struct, tag="deliver", frozen=True, kw_only=True):
    """Decode only: load this handoff for a request that is (or will be) in this engine core.

    The API server has compared the handoff's prompt digest with the request's tokens.
    Answered by LoadResult when the load has ended; asking again about the same `transfer_id` joins the same load.
    """

    request_id: str  # internal id
    handoff: Handoff
    deadline_ms: int


class ComputeLocally(msgspec.Struct, tag="compute_locally", frozen=True, kw_only=True):
    """Decode only: stop waiting for remote KV, prefill here. Answered by Ack."""

    request_id: str
    reason: str


LocalMessage = StatusQuery | HealthQuery | ConnectPeer | DeliverHandoff | ComputeLocally | CancelTransfer
PeerMessage = (
    Hello | LeaseRenew | LeaseRelease | CancelTransfer | StageExtract | StageFree | DoctorAsk | LinkAsk | LinkEnd
)


# ------------------------------------------------------------------ answers


class Ack(msgspec.Struct, tag="ack", frozen=True, kw_only=True):
    """Done, or was done before."""


class Refused(msgspec.Struct, tag="refused", frozen=True, kw_only=True):
    """`code` is machine-readable; `field`, `ours`, `theirs` name the difference where there is one.

    `ours` is the answering side's value, `theirs` that of the side that asked.
    """

    code: str
    message: str
    field: str = ""
    ours: str = ""
    theirs: str = ""


class HelloReply(msgspec.Struct, tag="hello_reply", frozen=True, kw_only=True):
    """The prefill side's record, and where each of its ranks serves its caches."""

    engine_id: str
    epoch: str
    record: dict[str, Any]
    ranks: tuple[RankAddress, ...]


class LeaseVerdict(msgspec.Struct, tag="lease_verdict", frozen=True, kw_only=True):
    """`held`: the lease was the reader's without a break until now.

    `state`: held, released, expired, cancelled, unknown.
    """

    held: bool
    state: str
    remaining_ms: int = 0


class StageSlot(msgspec.Struct, tag="stage_slot", frozen=True, kw_only=True):
    """Where the extracted bytes lie: `num_bytes` from block `first` of the rank's registered staging cache on."""

    first: int
    num_bytes: int


class DoctorReply(msgspec.Struct, tag="doctor_reply", frozen=True, kw_only=True):
    """To DoctorAsk; what cannot be done is Refused."""

    body: dict[str, Any]


class LinkState(msgspec.Struct, tag="link_state", frozen=True, kw_only=True):
    """`state`: busy (with another link: ask again), preparing, ready (dial now), linked, failed or ending or ended
    (see `detail`)."""

    state: str
    detail: str = ""


class StatusReply(msgspec.Struct, tag="status_reply", frozen=True, kw_only=True):
    """JSON-able status of one engine core."""

    status: dict[str, Any]


class HealthReply(msgspec.Struct, tag="health_reply", frozen=True, kw_only=True):
    """`problems` is empty when healthy; else one sentence per supervised thread that is dead or stuck."""

    problems: tuple[str, ...] = ()


class ConnectResult(msgspec.Struct, tag="connect_result", frozen=True, kw_only=True):
    """`outcome`: linked, refused (see `refused`), unreachable (see `detail`)."""

    outcome: str
    engine_id: str = ""
    epoch: str = ""
    detail: str = ""
    refused: Refused | None = None


class LoadResult(msgspec.Struct, tag="load_result", frozen=True, kw_only=True):
    """`outcome`: loaded, failed (`reason`), gone (the request had ended; the lease was given back)."""

    outcome: str
    reason: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    pull_ms: float = 0.0


Answer = (
    Ack
    | Refused
    | HelloReply
    | LeaseVerdict
    | StageSlot
    | DoctorReply
    | LinkState
    | StatusReply
    | HealthReply
    | ConnectResult
    | LoadResult
)
