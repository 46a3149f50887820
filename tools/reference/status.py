# SPDX-License-Identifier: Apache-2.0
"""`status.md`: the fields of `/pd/status`. Names come from the objects that make them, meanings are written here; a
test checks that the two are the same set."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Final

from tools.reference.markdown import code, page, table
from tools.reference.sources import PACKAGE, parse
from vllm_ascend_pd.engine.stats import COUNTERS, StatsRecorder
from vllm_ascend_pd.front.pool import Member
from vllm_ascend_pd.transfer.lease import LeaseTable
from vllm_ascend_pd.transfer.loads import LoadTable
from vllm_ascend_pd.transfer.staging.cost import LinkModel

TOP: Final = {
    "role": "`prefill` or `decode`",
    "engine_id": "this engine; new at every start",
    "epoch": "this process life; handoffs and signatures are bound to it",
    "draining": "it takes no new requests (`vllm pd drain`)",
    "requests": "`unfinished`: what the scheduler has, waiting ones too",
    "totals": "since start; below",
    "blocks": "KV blocks of the engine: `total`, `free`. Blocks of the prefix cache count as free",
    "control": "prefill: the address that peers are told",
    "leases": "prefill; below",
    "peers": "instances whose handshake agreed",
    "links": "prefill: where each rank's caches are served. decode: below",
    "transfers_in_flight": "decode: requests by state; below",
}
LEASES: Final = {
    "held": "now: prompts whose KV waits for a reader",
    "held_blocks": "now: their blocks",
    "unsigned_blocks": "now: those of them that routers asked for; at most half of all blocks",
    "ended": "now: ended, blocks not yet given back",
    "tombstones": "now: cancelled transfers that are remembered",
    "granted": "in all",
    "denied": "in all: no lease given; the share of unsigned ones is used up, or the transfer was cancelled before",
    "released": "in all: read, and given back",
    "expired": "in all: nobody came, or too late",
    "cancelled": "in all: decode gave the request up",
}
LOADS: Final = {
    "expected": "wait in the scheduler's queue, no blocks yet",
    "admitted": "have blocks, wait for the handoff",
    "pulling": "KV is on its way",
    "nothing": "decode had it all cached; runs",
    "local": "prefilled here",
}
POOL: Final = {
    "url": "as in `--pd-prefill`, or an address of its name",
    "state": "`new`, `healthy`, `dead` (probed with back-off), `draining` (takes nothing new), `refused` (answers, "
    "does not match)",
    "engine_id": "who answered last",
    "epoch": "the same",
    "in_flight": "asks that wait for its answer",
    "queued_tokens": "prompt tokens of these asks",
    "detail": "why it is not healthy",
}
LINKS: Final = {
    "tp_rank": "our rank",
    "cluster_id": "the peer's rank, as the data plane knows it",
    "transport": "`mapped`, `tcp`, `cann`; `none` while it is made anew",
    "engine_id": "the peer; left out when it has been replaced",
    "host": "the peer's rank",
    "port": "the same",
    "transfer": "`mode` (`--pd-transfer`), `transfers` by way, `model`: what the probe measured, or why there is none",
    "wire": "host implementation: calls, descriptors, bytes and nanoseconds of this link",
}
MODEL: Final = {
    "call_s": "seconds of an empty pull",
    "piece_s": "seconds more for each piece",
    "bytes_per_s": "of one large piece",
    "ask_s": "seconds of a question to the prefill rank's staging",
    "copy_bytes_per_s": "of gathering or scattering",
}
EXTRA_TOTALS: Final = {
    "tokens_loaded_remotely": "the same as `tokens`",
    "bytes_pulled": "the same as `bytes`",
    "failures": "loads that failed, by reason",
    "seconds": "by stage, all transfers together",
}


def find_top_fields() -> set[str]:
    """Keys of the engine core's part, and `draining`, which the answering API server adds."""
    keys: list[ast.expr | None] = []
    for node in [*_walk("engine/scheduler.py", "status"), *_walk("front/routes.py", "get_status")]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            keys += node.value.keys
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            keys.append(node.targets[0].slice)
    found = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return found - {"api_server", "engine_core"}  # described by themselves


def _walk(path: str, function: str) -> Iterator[ast.AST]:
    for node in ast.walk(parse(PACKAGE / path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            yield from ast.walk(node)


def find_fields() -> dict[str, set[str]]:
    """Section -> fields, from the objects themselves."""
    return {
        "top": find_top_fields(),
        "totals": set(StatsRecorder().totals()),
        "leases": set(LeaseTable(1.0).counts()),
        "transfers_in_flight": set(LoadTable(1, lambda handoff, moved: None).counts()),
        "pool": set(Member("http://p1:8100").to_status()),
        "model": {field.name for field in dataclasses.fields(LinkModel)},
    }


def described() -> dict[str, dict[str, str]]:
    """Section -> field -> meaning."""
    totals = {name: text for name, (_, text) in COUNTERS.items()}
    return {
        "top": TOP,
        "totals": {**totals, **EXTRA_TOTALS},
        "leases": LEASES,
        "transfers_in_flight": LOADS,
        "pool": POOL,
        "model": MODEL,
    }


def _table(meanings: dict[str, str]) -> str:
    return table(("field", "what it says"), [(code(name), text) for name, text in meanings.items()])


def render() -> str:
    """The page."""
    known = described()
    return page(
        "`/pd/status`",
        "`vllm pd status URL` shows it as tables, `--json` as it comes. All is the engine core's but "
        "`api_server`, which is "
        "of the API server process that answered (`pid`): with several of them ask again. 503 when the engine "
        "core does not "
        "answer; then `engine_core` says why.",
        _table(known["top"]),
        "## `totals`",
        _table(known["totals"]),
        "## `leases` (prefill)",
        _table(known["leases"]),
        "## `transfers_in_flight` (decode)",
        _table(known["transfers_in_flight"]),
        "## `links` (decode)",
        "Of each rank, to each prefill rank that it has pulled from.",
        _table(LINKS),
        "`transfer.model`:",
        _table(known["model"]),
        "## `api_server`",
        "On prefill `prefills_in_flight`. On decode `waiting_for_kv`, requests that wait for remote KV, and "
        "`pool`, one entry "
        "per prefill instance:",
        _table(known["pool"]),
    )
