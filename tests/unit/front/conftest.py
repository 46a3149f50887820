# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the front door's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.front.fakes import World


@pytest.fixture
def make_world() -> Callable[..., World]:
    """Build a World with these config values."""
    return World
