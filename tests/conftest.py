# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import setuptools  # noqa: F401  # early: torch imports it late, and its takeover of `distutils` fails in a long process

from tests.e2e.engines import Zygote

# A shell that starts us in the background has SIGINT ignored, and whom we start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process from which engines are forked; started when the first test wants it."""
    process = Zygote()
    yield process
    process.close()
