# SPDX-License-Identifier: Apache-2.0
"""F66: a proxy drops `kv_transfer_params`, or a part of them.

Must: a warning, a metric, or an error in strict mode. Was: right text, the decode side recomputed all, nobody noticed.
The strict mode is in tests/e2e/http (the front door applies it).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.builders import prompt
from tests.e2e.engines import Zygote
from tests.e2e.pairs import Counts, Pair, decode_leg, prefill_leg
from tests.field.conftest import BLOCK
from tests.field.peer import cancel, secret_of
from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.errors import PDKVUnavailable
from vllm_ascend_pd.front.front import PrefillFront


@pytest.mark.engine
@pytest.mark.parametrize("dropped", ["pd_handoff", "signature", "everything but the flag"])
def test_f66_a_handoff_that_lost_a_part_is_computed_locally_and_counted(zygote: Zygote, pair: Pair, dropped: str):
    tokens = prompt(2 * BLOCK + 3, seed=1)
    (params,) = prefill_leg(pair.prefill, [tokens])
    transfer_id = params["pd_handoff"]["transfer_id"]
    if dropped == "signature":
        params = {**params, "pd_handoff": {**params["pd_handoff"], "signature": ""}}
    elif dropped == "pd_handoff":
        params = {key: value for key, value in params.items() if key != dropped}
    else:
        params = {"do_remote_prefill": True}
    before = Counts.of(pair.decode)
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    took = Counts.of(pair.decode).since(before)
    assert [answer] == pair.expected([tokens])
    assert (took.loaded, sum(took.failures.values())) == (0, 1)
    cancel(pair.prefill, secret_of(zygote), [transfer_id])


class _Metrics:
    def __init__(self) -> None:
        self.fallbacks: list[str] = []
        self.paths: list[str] = []

    def count_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)

    def count_request(self, path: str) -> None:
        self.paths.append(path)


def front_door(metrics: _Metrics, **config: object) -> PrefillFront:
    """A decode instance's front door without prefill URLs: requests have to bring their handoff."""
    settings = PDConfig(role=PDRole.DECODE, engine_id="d", epoch="e", runtime_dir="/nowhere", **config)
    return PrefillFront(SimpleNamespace(config=settings, metrics=metrics, pool=None), None, None)


def request_without_params() -> SimpleNamespace:
    """As the engine client makes it."""
    sampling = SimpleNamespace(n=1, prompt_logprobs=None, extra_args=None)
    return SimpleNamespace(
        request_id="r",
        sampling_params=sampling,
        prompt_token_ids=[1, 2],
        prompt_embeds=None,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        priority=0,
    )


def test_f66_the_front_door_counts_a_request_without_params():
    metrics = _Metrics()
    front_door(metrics).wrap_request(request_without_params())
    assert (metrics.fallbacks, metrics.paths) == (["no_handoff"], ["local"])


def test_f66_in_strict_mode_the_front_door_refuses_it():
    metrics = _Metrics()
    with pytest.raises(PDKVUnavailable):
        front_door(metrics, require_remote_kv=True).wrap_request(request_without_params())
    assert (metrics.fallbacks, metrics.paths) == (["no_handoff"], ["failed"])
