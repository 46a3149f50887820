# SPDX-License-Identifier: Apache-2.0
"""F28: our connector beside another one, on a hybrid model.

Must: the external-transfer token counter is the prompt (all but its last token). Was: 0, all was computed locally.
"""

from __future__ import annotations

import pytest

from tests.builders import prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import SOURCES, start_pair

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", ["gqa2", "sliding"])
def test_f28_the_whole_prompt_comes_remotely_beside_a_second_connector(
    zygote: Zygote, engines: list[Engine], model: str
):
    theirs = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }
    pair = start_pair(zygote, model, decode={"kv_transfer_config": theirs})
    engines.extend(pair.engines())
    tokens = prompt(5 * 32 + 5, seed=1)
    took = pair.check([tokens])
    assert took.loaded == len(tokens) - 1
    assert pair.decode.call("metrics")[SOURCES.format("external_kv_transfer")] == len(tokens) - 1
