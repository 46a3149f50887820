# SPDX-License-Identifier: Apache-2.0
"""Which versions belong together on an Ascend host, and what to install where they do not.

Pure: facts in (`host_facts.collect_facts` reads them), verdicts out. Called at the start of `vllm serve --pd-role`
on a host with NPUs, and by `vllm pd doctor`; both print the same words. Not run on an NPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_ascend_pd.errors import PDConfigError

Level = Literal["ok", "warn", "fail"]

LANE: Final = "ascend"
VLLM: Final = "0.23.0"
VLLM_ASCEND: Final = "0.23.0.post1"
TORCH: Final = "2.10.0"
TORCH_NPU: Final = "2.10.0.post4"
TRITON_ASCEND: Final = "3.2.2"
CANN: Final = "9.1.0"
# CANN's release notes pair a driver with each release and older drivers fail in ways that name no version. The exact
# floor of CANN 9.1.0 is not public in a form that could be checked here, so an old driver is a warning.
OLD_DRIVER: Final = (25,)
PYTHONS: Final = ((3, 10), (3, 12))
CHIPS: Final = ("A2", "A3")


@dataclass(frozen=True, kw_only=True)
class PairingFacts:
    """What is installed. None: not there, or could not be read."""

    has_npu: bool  # the driver's device files are there
    python: tuple[int, int]
    distribution: str | None = None  # version of the distribution `vllm`: 0.23.0+pd.1.ascend
    vllm_version_override: str | None = None  # $VLLM_VERSION, which vllm-ascend believes instead
    vllm_ascend: str | None = None
    vllm_ascend_chip: str | None = None  # what its kernels were built for: A2, A3, _310P, A5
    torch: str | None = None
    torch_npu: str | None = None
    triton: str | None = None
    triton_ascend: str | None = None
    cann: str | None = None
    driver: str | None = None
    chip: str | None = None  # of this host: A2, A3, _310P, A5


@dataclass(frozen=True)
class Verdict:
    """One line of the answer; `advice` is empty when it is ok."""

    name: str
    level: Level
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}" + (f": {self.advice}" if self.advice else "")


def check_pairing(facts: PairingFacts) -> list[Verdict]:
    """A verdict for each thing that must fit; only one where this host has no NPU and does not pretend to."""
    if not facts.has_npu and facts.vllm_ascend is None:
        return [Verdict("npu", "ok", "no NPU on this host")]
    checks: tuple[Callable[[PairingFacts], Verdict | None], ...] = (
        _check_lane,
        _check_override,
        _check_vllm_ascend,
        _check_chip,
        _check_torch,
        _check_torch_npu,
        _check_triton,
        _check_cann,
        _check_driver,
        _check_python,
    )
    if facts.vllm_ascend is None and _lane_of(facts.distribution) not in (None, LANE):
        return [_check_lane(facts)]
    return [verdict for check in checks if (verdict := check(facts)) is not None]


def refuse_unpaired(verdicts: Sequence[Verdict]) -> None:
    """Stop a start.

    Raises:
        PDConfigError: something does not fit; one line for each, with what to do.
    """
    failed = [str(verdict) for verdict in verdicts if verdict.level == "fail"]
    if failed:
        raise PDConfigError("the installed versions do not belong together:\n  " + "\n  ".join(failed))


def describe_pair() -> str:
    """The pair in one line."""
    return (
        f"vLLM {VLLM} (lane {LANE}), vllm-ascend {VLLM_ASCEND}, torch {TORCH}, torch-npu {TORCH_NPU}, "
        f"triton-ascend {TRITON_ASCEND}, CANN {CANN}"
    )


def parse_numbers(version: str) -> tuple[int, ...]:
    """The dotted numbers at the start of a version: (9, 1, 0) of `9.1.0`, (25, 5, 1) of `25.5.1.b010`."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def get_generation(chip_name: str, npu_name: str = "") -> str | None:
    """The chip family that `npu-smi info -t board` means by Chip Name and NPU Name; None where unknown.

    A2 says 910B1…910B4, A3 says Ascend910 with an NPU name such as 9391.
    """
    name = chip_name.lower()
    if "310p" in name:
        return "_310P"
    if "950" in name:
        return "A5"
    if "910b" in name or "a2g3" in name:
        return "A2"
    if "910c" in name or ("910" in name and re.match(r"93\d\d", npu_name)) or re.search(r"910_?93\d\d", name):
        return "A3"
    return None


def _lane_of(distribution: str | None) -> str | None:
    found = re.search(r"\+pd\.[\d.]+?\.([a-z.]+)$", distribution or "")
    return found[1].replace(".", "-") if found else None


def _public(version: str) -> str:
    return version.partition("+")[0]


def _check_lane(facts: PairingFacts) -> Verdict:
    name, want = "vllm", f"install the wheel of lane {LANE}: vllm-{VLLM}+pd.<n>.{LANE}-….whl"
    if facts.distribution is None:
        return Verdict(name, "fail", "not installed", want)
    lane = _lane_of(facts.distribution)
    seen = f"{facts.distribution} (lane {lane})" if lane else f"{facts.distribution}, not a build of vllm-ascend-pd"
    if lane == LANE and _public(facts.distribution) == VLLM:
        return Verdict(name, "ok", seen)
    if facts.vllm_ascend is None and lane is not None:
        return Verdict(name, "warn", f"{seen} on a host with NPUs", f"it computes on the CPU; for NPUs {want}")
    return Verdict(name, "fail", seen, f"vllm-ascend {VLLM_ASCEND} needs vLLM {VLLM}; {want}")


def _check_override(facts: PairingFacts) -> Verdict | None:
    given = facts.vllm_version_override
    if given is None or given == VLLM:
        return None
    return Verdict(
        "VLLM_VERSION", "fail", given, f"vllm-ascend believes it instead of vLLM's {VLLM}: unset VLLM_VERSION"
    )


def _check_vllm_ascend(facts: PairingFacts) -> Verdict:
    name, seen = "vllm-ascend", facts.vllm_ascend or "not installed"
    install = f"build vllm-ascend=={VLLM_ASCEND} from its sdist with SOC_VERSION set, or use its image for this chip"
    if facts.vllm_ascend is None:
        return Verdict(name, "fail", seen, install)
    if _public(facts.vllm_ascend) == VLLM_ASCEND:
        return Verdict(name, "ok", seen)
    if parse_numbers(facts.vllm_ascend) == parse_numbers(VLLM):
        return Verdict(name, "warn", seen, f"checked with {VLLM_ASCEND} only; {install}")
    return Verdict(name, "fail", seen, f"does not go with vLLM {VLLM}; {install}")


def _check_chip(facts: PairingFacts) -> Verdict | None:
    """Its wheels for A2, A3 and 310P have one file name; the wrong one installs and fails at run time."""
    if facts.vllm_ascend is None:
        return None
    name, built, host = "chip", facts.vllm_ascend_chip, facts.chip
    if built is None:
        return Verdict(
            name,
            "fail",
            "vllm_ascend/_build_info.py is missing",
            "vllm-ascend was not built for any chip: use its image for this host's chip, or build its sdist with "
            "SOC_VERSION set",
        )
    if host is None:
        return Verdict(
            name, "warn", f"vllm-ascend is built for {built}, this host's chip is unknown", "look at `npu-smi info`"
        )
    if built != host:
        return Verdict(
            name,
            "fail",
            f"vllm-ascend is built for {built}, this host has {host}",
            f"use vllm-ascend's image for {host}, or build its sdist with SOC_VERSION for that chip",
        )
    if host not in CHIPS:
        return Verdict(name, "fail", host, f"prefill/decode is for {' and '.join(CHIPS)}: run without --pd-role")
    return Verdict(name, "ok", host)


def _check_torch(facts: PairingFacts) -> Verdict:
    name, seen = "torch", facts.torch or "not installed"
    if facts.torch is not None and _public(facts.torch) == TORCH:
        return Verdict(name, "ok", seen)
    return Verdict(name, "fail", seen, f"install torch=={TORCH} (torch-npu and vllm-ascend are built against it)")


def _check_torch_npu(facts: PairingFacts) -> Verdict:
    name, seen = "torch-npu", facts.torch_npu or "not installed"
    install = f"pip install --no-deps torch-npu=={TORCH_NPU}"
    if facts.torch_npu is None:
        return Verdict(name, "fail", seen, install)
    if _public(facts.torch_npu) == TORCH_NPU:
        return Verdict(name, "ok", seen)
    if parse_numbers(facts.torch_npu) == parse_numbers(TORCH):
        return Verdict(name, "warn", seen, f"checked with {TORCH_NPU} only; {install}")
    return Verdict(name, "fail", seen, f"does not go with torch {TORCH}; {install}")


def _check_triton(facts: PairingFacts) -> Verdict:
    """Both projects install into the folder `triton`; the later one wins file by file."""
    name = "triton-ascend"
    repair = f"pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend=={TRITON_ASCEND}"
    if facts.triton is not None and facts.triton_ascend is not None:
        seen = f"{facts.triton_ascend} and triton {facts.triton}, in one folder"
        return Verdict(name, "warn", seen, repair)
    if facts.triton_ascend is None:
        return Verdict(name, "warn", "not installed", repair)
    if _public(facts.triton_ascend) != TRITON_ASCEND:
        return Verdict(name, "warn", facts.triton_ascend, f"vllm-ascend {VLLM_ASCEND} asks for {TRITON_ASCEND}")
    return Verdict(name, "ok", facts.triton_ascend)


def _check_cann(facts: PairingFacts) -> Verdict:
    name, seen = "CANN", facts.cann or "not found"
    numbers = parse_numbers(facts.cann or "")
    if numbers[:3] == parse_numbers(CANN):
        return Verdict(name, "ok", seen)
    if not numbers:
        advice = f"install CANN {CANN} and source its set_env.sh, or set ASCEND_HOME_PATH to it"
        return Verdict(name, "fail", seen, advice)
    if numbers[:2] == parse_numbers(CANN)[:2]:
        return Verdict(name, "warn", seen, f"checked with CANN {CANN} only")
    return Verdict(name, "fail", seen, f"torch-npu {TORCH_NPU} and vllm-ascend {VLLM_ASCEND} need CANN {CANN}")


def _check_driver(facts: PairingFacts) -> Verdict:
    name, seen = "driver", facts.driver or "not found"
    if facts.driver is None:
        advice = "in a container, mount /usr/local/Ascend/driver/version.info; else install the driver"
        return Verdict(name, "warn", seen, advice)
    if parse_numbers(facts.driver) < OLD_DRIVER:
        return Verdict(name, "warn", seen, f"look up in the release notes of CANN {CANN} whether it takes this driver")
    return Verdict(name, "ok", seen)


def _check_python(facts: PairingFacts) -> Verdict:
    low, high = PYTHONS
    seen = ".".join(map(str, facts.python))
    if low <= facts.python <= high:
        return Verdict("python", "ok", seen)
    return Verdict("python", "fail", seen, f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}")
