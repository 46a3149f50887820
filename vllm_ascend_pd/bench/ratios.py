# SPDX-License-Identifier: Apache-2.0
"""From samples to medians and ratios. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def to_gb_per_s(num_bytes: int, seconds: float) -> float:
    """Decimal GB/s, payload counted once."""
    return num_bytes / seconds / 1e9


def take_medians(samples: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    """Median per name, names in the order of their first sample."""
    groups: dict[Name, list[float]] = defaultdict(list)
    for name, value in samples:
        groups[name].append(value)
    return {name: median(values) for name, values in groups.items()}


def choose_fastest(samples: Iterable[tuple[Name, float]]) -> Name:
    """The name with the smallest median of seconds. Raises ValueError without samples."""
    medians = take_medians(samples)
    if not medians:
        raise ValueError("no samples")
    return min(medians, key=lambda name: medians[name])


def divide(above: Mapping[str, float], below: Mapping[str, float]) -> dict[str, float]:
    """above / below for every key that both have."""
    return {key: above[key] / below[key] for key in above if key in below and below[key] > 0}


def format_bytes(num_bytes: int) -> str:
    """`2 KiB`, `64 MiB`: exact where it is a whole number."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{num_bytes} B"
