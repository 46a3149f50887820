# SPDX-License-Identifier: Apache-2.0
"""Each place where an edit of ours stands in code that vllm-ascend replaces: looked at by a person, with the verdict.

`check.py` refuses an intersection that is not here, an entry that no longer occurs, a `Wraps` that does not call the
original, and a `Refused` whose rule does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Wraps:
    """vllm-ascend's code calls the original, edited one; the reason says why what it adds does not matter."""

    reason: str


@dataclass(frozen=True)
class NotNeeded:
    """Our edit does not run there and need not."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The combination is refused at start, by a rule of `vllm_ascend_pd.ascend.together`."""

    rule: str


Verdict = Wraps | NotNeeded | Refused

_SCHEDULER: Final = "vllm/v1/core/sched/scheduler.edit.py"
_RUNNER: Final = "vllm/v1/worker/gpu_model_runner.edit.py"
_PATCHES: Final = "vllm_ascend/patch/platform"

# (edit file, scope of the edit, where vllm-ascend replaces it)
REVIEWED: Final[dict[tuple[str, str, str], Verdict]] = {
    (
        _SCHEDULER,
        "Scheduler.update_from_output",
        "vllm_ascend/core/recompute_scheduler.py:RecomputeScheduler.update_from_output",
    ): Refused("recompute-scheduler"),
    (
        _SCHEDULER,
        "Scheduler.update_from_output",
        f"{_PATCHES}/patch_async_swa_kv_lifetime.py:Scheduler.update_from_output",
    ): Wraps("counts tokens in flight, then calls the edited method with the same arguments"),
    (
        _SCHEDULER,
        "Scheduler.update_from_output",
        f"{_PATCHES}/patch_balance_schedule.py:vllm.v1.core.sched.scheduler.Scheduler",
    ): Wraps("BalanceScheduler derives from the edited class and does not override this method"),
    (
        _SCHEDULER,
        "Scheduler.update_from_output",
        f"{_PATCHES}/patch_profiling_chunk.py:cls.update_from_output",
    ): Refused("profiling-scheduler"),
    (
        _SCHEDULER,
        "Scheduler._connector_finished",
        f"{_PATCHES}/patch_async_swa_kv_lifetime.py:Scheduler._connector_finished",
    ): Wraps(
        "sets a context and calls the edited method; in it, windows keep more blocks than ours asks for, not fewer"
    ),
    (
        _SCHEDULER,
        "Scheduler._connector_finished",
        f"{_PATCHES}/patch_balance_schedule.py:vllm.v1.core.sched.scheduler.Scheduler",
    ): Wraps("BalanceScheduler derives from the edited class and does not override this method"),
    (
        _RUNNER,
        "GPUModelRunner._allocate_kv_cache_tensors",
        "vllm_ascend/worker/model_runner_v1.py:NPUModelRunner._allocate_kv_cache_tensors",
    ): NotNeeded(
        "the edit puts CPU caches into shared memory; caches on an NPU are registered where they are, and with a "
        "kv_transfer_config NPUModelRunner starts each on a 2 MiB boundary itself"
    ),
    (
        _RUNNER,
        "GPUModelRunner._allocate_kv_cache_tensors",
        "vllm_ascend/_310p/model_runner_310p.py:NPUModelRunner310._allocate_kv_cache_tensors",
    ): NotNeeded("a 310P is refused at start: vllm_ascend_pd.ascend.pairing.CHIPS"),
}
