# SPDX-License-Identifier: Apache-2.0
"""Which vLLM these tests run on, and what is different there: said here and nowhere else.

A lane leaves a model out only with the words in which its vLLM refuses it (`tests/e2e/test_lane.py` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from tests.models import MODELS


@dataclass(frozen=True)
class Lane:
    """One release of vLLM on CPU."""

    name: str  # in vllm/UPSTREAM.toml
    release: str
    without: Mapping[str, str] = field(default_factory=dict)  # tiny model -> upstream's words for why
    other_block: int = 64  # besides 32, that the attention of `gqa2` takes
    # Whether layers share one buffer, so that the number of blocks is rounded down until each starts on 2 MiB.
    rounds_blocks: bool = True
    # Model, data plane of the staged transfers that are compared, and the models whose straight ones go over TCP.
    staged: tuple[tuple[str, str], ...] = ()
    straight_tcp: tuple[str, ...] = ("gqa2",)

    @property
    def models(self) -> list[str]:
        """The tiny models that run here."""
        return [name for name in MODELS if name not in self.without]


LANES = (
    Lane("cpu", "0.32.0", staged=(("gqa2", "mapped"), ("mla", "tcp"), ("sliding", "tcp"))),
    Lane(
        "ascend-cpu",
        "0.23.0",
        without={"mla": "MLA is not supported on CPU"},
        other_block=16,
        rounds_blocks=False,
        staged=tuple((name, transport) for name in MODELS if name != "mla" for transport in ("mapped", "tcp")),
        straight_tcp=("gqa2", "gqa4", "mha", "sliding"),
    ),
)


def find_lane(installed: str) -> Lane:
    """The lane of an installed version, without its local part.

    Raises:
        RuntimeError: no lane is made from it.
    """
    release = installed.partition("+")[0]
    for lane in LANES:
        if lane.release == release:
            return lane
    raise RuntimeError(f"vLLM {installed} is installed; these tests know {', '.join(x.release for x in LANES)}")


LANE = find_lane(version("vllm"))
