# SPDX-License-Identifier: Apache-2.0
"""Tests: a package, so that its helpers import as `tests.…` whatever else is on the path."""
