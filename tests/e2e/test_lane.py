# SPDX-License-Identifier: Apache-2.0
"""The lane is the one that was asked for, and what it leaves out its vLLM cannot do."""

from __future__ import annotations

import os

import pytest

from tests.builders import engine_kwargs
from tests.e2e.engines import Zygote
from tests.lane import LANE
from tests.models import MODELS

pytestmark = pytest.mark.engine


def test_the_installed_vllm_is_the_lane_that_was_asked_for():
    assert os.environ.get("PD_TEST_LANE", "cpu") == LANE.name


def test_what_the_lane_leaves_out_is_refused_by_its_vllm_in_the_words_that_we_give(zygote: Zygote):
    assert set(LANE.models) | set(LANE.without) == set(MODELS)
    for name, words in LANE.without.items():
        engine = zygote.start(f"refused-{name}", engine_kwargs(name))
        error = engine.start_error()
        engine.close()
        assert words in error + engine.log_tail()
