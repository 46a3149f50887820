# SPDX-License-Identifier: Apache-2.0
"""Fixtures of several files here."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A secret file as the server takes it, in place of the one that a manifest mounts."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("x" * 64)
    return path
