# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.engines import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process from which engines are forked; started when the first test wants it."""
    process = Zygote()
    yield process
    process.close()
