# SPDX-License-Identifier: Apache-2.0
"""Counts: an interval is handed out once, totals stay, labels are a bounded set."""

from __future__ import annotations

import threading

import pytest

from vllm_ascend_pd.engine.stats import COUNTERS, STAGES, StatsRecorder, reason_label


def test_an_interval_is_taken_once_and_totals_stay():
    stats = StatsRecorder()
    stats.count("bytes", 100), stats.count("bytes", 1), stats.fail("plan: x"), stats.stage("pull", 0.5)
    assert stats.take() == {"bytes": 101, "failures": {"plan": 1}, "stages": {"pull": [0.5]}}
    assert stats.take() is None
    stats.fail("plan: y")
    assert stats.take() == {"failures": {"plan": 1}}
    totals = stats.totals()
    assert (totals["bytes_pulled"], totals["failures"], totals["seconds"]["pull"]) == (101, {"plan": 2}, 0.5)


def test_totals_name_every_counter_and_stage_from_the_start():
    totals = StatsRecorder().totals()
    assert {name: totals[name] for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
    assert set(totals["seconds"]) == set(STAGES)


def test_a_taken_interval_is_not_written_to_any_more():
    stats = StatsRecorder()
    stats.fail("a")
    taken = stats.take()
    stats.fail("a")
    assert taken == {"failures": {"a": 1}}


def test_counts_of_several_threads_are_all_kept():
    stats = StatsRecorder()
    threads = [threading.Thread(target=lambda: [stats.count("tokens") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.totals()["tokens"] == stats.take()["tokens"] == 8000


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("lease_expired", "lease_expired"),
        ("plan: the handoff covers 3 tokens, 4 are needed", "plan"),
        ("unreachable: tcp://10.0.0.1:9 did not answer", "unreachable"),
        ("no handoff", "no_handoff"),
        ("the prefill side has no TP rank 3 (it has [0])", "other"),
        ("", "other"),
        ("x" * 33, "other"),
    ],
)
def test_a_reason_becomes_one_of_few_labels(reason: str, label: str):
    assert reason_label(reason) == label
