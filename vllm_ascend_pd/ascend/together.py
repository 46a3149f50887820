# SPDX-License-Identifier: Apache-2.0
"""What of vllm-ascend does not work together with `--pd-role`, refused at start by name and value.

Pure. `refuse_settings` sees what was typed (before any engine exists), `refuse_model` what the model's quantisation
means for its caches. `tools/ascend/reviewed.py` ties the rules to the code of vllm-ascend that makes them necessary.
Not run on an NPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_ascend_pd.errors import PDConfigError

_FLAG: Final = "--additional-config"


@dataclass(frozen=True)
class Settings:
    """What was typed, as far as it matters here."""

    role: str  # prefill or decode
    additional: Mapping[str, Any]
    environ: Mapping[str, str]
    eager: bool


@dataclass(frozen=True)
class Rule:
    """One thing that does not go together: `find` gives what was set, in the words of the user, or None."""

    name: str
    find: Callable[[Settings], tuple[str, str] | None]  # (what was given, what it has to be)
    why: str


def _additional(key: str) -> Callable[[Settings], tuple[str, str] | None]:
    def find(settings: Settings) -> tuple[str, str] | None:
        value = settings.additional.get(key)
        return (f"{_FLAG} {key}={json.dumps(value, default=str)}", "false") if value else None

    return find


def _balance(settings: Settings) -> tuple[str, str] | None:
    value = settings.environ.get("VLLM_ASCEND_BALANCE_SCHEDULING", "0").strip()
    if value not in ("", "0"):
        return f"VLLM_ASCEND_BALANCE_SCHEDULING={value}", "0"
    return _additional("enable_balance_scheduling")(settings)


def _dynamic_batch(settings: Settings) -> tuple[str, str] | None:
    value = settings.additional.get("SLO_limits_for_dynamic_batch", -1)
    return (f"{_FLAG} SLO_limits_for_dynamic_batch={value}", "-1") if value != -1 else None


def _nested(key: str) -> Callable[[Settings], tuple[str, str] | None]:
    def find(settings: Settings) -> tuple[str, str] | None:
        value = settings.additional.get(key)
        enabled = isinstance(value, Mapping) and value.get("enabled")
        return (f'{_FLAG} {key}={{"enabled": true}}', '{"enabled": false}') if enabled else None

    return find


def _launch_blocking(settings: Settings) -> tuple[str, str] | None:
    value = settings.environ.get("ASCEND_LAUNCH_BLOCKING", "0").strip()
    return (
        (f"ASCEND_LAUNCH_BLOCKING={value}", "0, or with --enforce-eager")
        if value == "1" and not settings.eager
        else None
    )


RULES: Final = (
    Rule(
        "recompute-scheduler",
        _additional("recompute_scheduler_enable"),
        "vllm-ascend's RecomputeScheduler replaces Scheduler.update_from_output, where the ranks' answers are counted, "
        "and loads would never end. What it is for is --pd-load-failure reprefill here",
    ),
    Rule(
        "balance-scheduler",
        _balance,
        "it is for instances that do both prefill and decode; here the decode side chooses prefill instances by load",
    ),
    Rule(
        "dynamic-batch-scheduler",
        _dynamic_batch,
        "SchedulerDynamicBatch brings its own schedule(), which keeps no account of prompts whose KV is on its way",
    ),
    Rule(
        "profiling-scheduler",
        _nested("profiling_chunk_config"),
        "it needs pipeline parallelism, which this release does not hand over",
    ),
    Rule(
        "xlite",
        _nested("xlite_graph_config"),
        "its own model runner has not been looked at: it may keep KV elsewhere",
    ),
    Rule(
        "kv-nz",
        _additional("enable_kv_nz"),
        "the decode side's MLA cache would be in the NZ format, prefill sides write ND, and this release converts none",
    ),
    Rule(
        "sparse-sfa-c8",
        _additional("enable_sparse_sfa_c8"),
        "packed int8 caches are not handed over by this release",
    ),
    Rule(
        "sparse-li-c8",
        _additional("enable_sparse_li_c8"),
        "int8 indexer caches are not handed over by this release",
    ),
    Rule(
        "launch-blocking",
        _launch_blocking,
        "graphs cannot be captured while every launch waits",
    ),
)


def find_refusals(settings: Settings) -> list[tuple[Rule, str]]:
    """Every rule that is broken, each with its sentence."""
    found = []
    for rule in RULES:
        if (hit := rule.find(settings)) is not None:
            given, wanted = hit
            found.append(
                (rule, f"{given} does not go with --pd-role {settings.role}: it has to be {wanted}: {rule.why}")
            )
    return found


def refuse_settings(role: str, additional: Any, environ: Mapping[str, str], *, eager: bool) -> None:
    """Stop a start whose flags or environment cannot work together.

    Args:
        role: of `--pd-role`.
        additional: of `--additional-config`; anything but a mapping means nothing was given.
        environ: the environment.
        eager: whether `--enforce-eager` is given.

    Raises:
        PDConfigError: one line for each setting.
    """
    settings = Settings(role, additional if isinstance(additional, Mapping) else {}, environ, eager)
    if found := find_refusals(settings):
        raise PDConfigError("\n  ".join(sentence for _, sentence in found))


# Attributes of vllm-ascend's quantisation config: the decode side alone would keep these caches in int8.
QUANTISED_CACHES: Final = {
    "enable_c8_quant": "C8 (kv_quant_type)",
    "enable_fa_quant": "FA (fa_quant_type)",
}


def refuse_model(role: str, quant_config: Any) -> None:
    """Stop a decode instance whose model quantises the KV cache there and not on prefill instances.

    Raises:
        PDConfigError: names the quantisation.
    """
    if role != "decode" or quant_config is None:
        return
    for attribute, name in QUANTISED_CACHES.items():
        if getattr(quant_config, attribute, False) is True:
            raise PDConfigError(
                f"--pd-role decode does not go with a model whose quantisation includes KV caches by {name}: "
                f"vllm-ascend keeps them in int8 on decode instances and in the model's type on prefill instances, and "
                f"KV is moved as it is. Serve weights whose quantisation description leaves KV caches out"
            )
