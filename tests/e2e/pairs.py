# SPDX-License-Identifier: Apache-2.0
"""A prefill/decode pair beside an aggregated engine, and the two-phase request by hand.

Every comparison goes through `Pair.check`: the tokens are the aggregated engine's, the tokens loaded remotely are
what the plan says, and all blocks come back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.builders import NUM_TOKENS, decode_sampling, engine_kwargs, prefill_sampling, prompt, sampling
from tests.e2e.engines import Engine, Result, Zygote

HANDSHAKE_SEED = 999_983  # of a prompt that no test has

PREFILL_TOKEN_BUDGET = 128  # longer prompts are prefilled in chunks

SOURCES = "vllm:prompt_tokens_by_source_total{{source={}}}"


@dataclasses.dataclass(frozen=True)
class Counts:
    """A decode engine's counters."""

    loaded: int  # prompt tokens pulled
    transfers: int
    empty: int  # handoffs with nothing to move
    failures: dict[str, int]
    local_hits: int  # prompt tokens from its own prefix cache

    @classmethod
    def of(cls, engine: Engine) -> Counts:
        """Read them now."""
        totals = engine.status()["pd"]["totals"]
        hits = int(engine.call("metrics").get(SOURCES.format("local_cache_hit"), 0))
        return cls(totals["tokens"], totals["transfers"], totals["transfers_empty"], dict(totals["failures"]), hits)

    def since(self, before: Counts) -> Counts:
        """The difference."""
        failures = {k: v - before.failures.get(k, 0) for k, v in self.failures.items()}
        return Counts(
            self.loaded - before.loaded,
            self.transfers - before.transfers,
            self.empty - before.empty,
            {k: v for k, v in failures.items() if v},
            self.local_hits - before.local_hits,
        )


def prefill_leg(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """First legs, together; what each returned."""
    results = engine.generate(prompts, [prefill_sampling()] * len(prompts))
    handed = [result.kv_transfer_params for result in results]
    assert all(params and params["do_remote_prefill"] for params in handed), handed
    return [params for params in handed if params]


def decode_leg(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[dict[str, Any] | None],
    max_tokens: int = NUM_TOKENS,
) -> list[Result]:
    """Second legs, together."""
    return engine.generate(prompts, [decode_sampling(one, max_tokens) for one in params])


@dataclasses.dataclass
class Pair:
    """Three engines of one model."""

    model: str
    aggregated: Engine
    prefill: Engine
    decode: Engine
    free: tuple[int, int] = (0, 0)

    def engines(self) -> tuple[Engine, Engine, Engine]:
        """All."""
        return self.aggregated, self.prefill, self.decode

    def start(self) -> Pair:
        """Wait until all run; remember the free blocks."""
        for engine in self.engines():
            engine.ready()
        self.free = (self.prefill.free_blocks(), self.decode.free_blocks())
        return self

    def shake_hands(self) -> None:
        """A prompt with nothing to move may be answered before its handoff is looked at when that is the first one."""
        self.transfer([prompt(2, seed=HANDSHAKE_SEED)])
        self.check_blocks_are_back()

    def close(self) -> None:
        """Shut all down."""
        for engine in self.engines():
            engine.close()

    def expected(self, prompts: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> list[tuple[int, ...]]:
        """The oracle's tokens."""
        results = self.aggregated.generate(prompts, [sampling(max_tokens)] * len(prompts))
        return [result.token_ids for result in results]

    def transfer(self, prompts: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> list[tuple[int, ...]]:
        """Both legs of all prompts; the tokens."""
        params = prefill_leg(self.prefill, prompts)
        return [result.token_ids for result in decode_leg(self.decode, prompts, params, max_tokens)]

    def check(self, prompts: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> Counts:
        """Both legs give the oracle's tokens, everything that D had not cached came from P, all blocks are back.

        Returns what it took, for closer checks.
        """
        before = Counts.of(self.decode)
        answers = self.transfer(prompts, max_tokens)
        took = Counts.of(self.decode).since(before)
        assert answers == self.expected(prompts, max_tokens)
        assert took.failures == {}
        assert took.loaded + took.local_hits == sum(len(tokens) - 1 for tokens in prompts)
        assert took.transfers + took.empty == len(prompts)
        self.check_blocks_are_back()
        return took

    def check_blocks_are_back(self, timeout_s: float = 15.0) -> None:
        """Both pools are as they were at the start, and no lease is held."""
        self.prefill.wait_for_free_blocks(self.free[0], timeout_s)
        self.decode.wait_for_free_blocks(self.free[1], timeout_s)


def start_pair(
    zygote: Zygote,
    model: str,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **common: Any,
) -> Pair:
    """Fork all three at once. `prefill` and `decode` go to one side only, `common` to both of them."""
    aggregated = zygote.start("aggregated", engine_kwargs(model, **_without_pd(common)), core=0)
    budget = {"max_num_batched_tokens": PREFILL_TOKEN_BUDGET, "max_num_seqs": 16}
    first = engine_kwargs(model, pd_role="prefill", **(budget | common | (prefill or {})))
    second = engine_kwargs(model, pd_role="decode", **(common | (decode or {})))
    return Pair(
        model, aggregated, zygote.start("prefill", first, core=1), zygote.start("decode", second, core=0)
    ).start()


def _without_pd(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in arguments.items() if not k.startswith("pd_") and k != "kv_transfer_config"}
