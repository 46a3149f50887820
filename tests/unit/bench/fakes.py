# SPDX-License-Identifier: Apache-2.0
"""Small runs that end in seconds, and recorded samples."""

from __future__ import annotations

import sys

from vllm_ascend_pd.bench.transfer.geometry import Geometry
from vllm_ascend_pd.bench.transfer.run import Outcome, Sample, TransferPlan, TransferResult
from vllm_ascend_pd.bench.transfer.specs import SPECS

MIB = 1 << 20
SPEC_BY_NAME = {spec.name: spec for spec in SPECS}


def make_plan(names, **changes):
    """1 MiB in pieces of 4 and 64 KiB out of pools of 4 MiB."""
    fields = {
        "geometry": Geometry(4 * MIB, MIB, 2),
        "pieces": (4096, 65536),
        "rounds": 1,
        "specs": tuple(SPEC_BY_NAME[name] for name in names),
        "python": sys.executable,
        "peers_python": sys.executable,
        "num_threads": 2,
    }
    return TransferPlan(**{**fields, **changes})


def make_result(seconds, states=None):
    """`seconds[contender][piece]` is a list, one per round; a tuning sample beside it must not count."""
    result = TransferResult()
    for name, rows in seconds.items():
        outcome = Outcome(SPEC_BY_NAME[name], state=(states or {}).get(name, "ran"))
        result.outcomes.append(outcome)
        for piece, values in rows.items():
            outcome.variants[piece] = "default"
            result.samples.append(Sample(name, piece, "default", "tune", 0, 1e-9, None, 0.0))
            for number, value in enumerate(values):
                result.samples.append(Sample(name, piece, "default", "round", number, value, None, value))
    for name, state in (states or {}).items():
        if name not in seconds:
            result.outcomes.append(Outcome(SPEC_BY_NAME[name], state=state, reason="no module named x"))
    return result
