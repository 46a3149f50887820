# SPDX-License-Identifier: Apache-2.0
"""F28: our connector beside another one, on a hybrid model.

Must: the external-transfer token counter is the prompt (all but its last token). Was: 0, all was computed locally.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import SOURCES, start_pair

pytestmark = pytest.mark.engine
THEIRS: dict[str, Any] = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "tests.field.second_connector",
    "kv_role": "kv_both",
}


@pytest.mark.parametrize("model", ["gqa2", "sliding"])
def test_f28_the_whole_prompt_comes_remotely_beside_a_second_connector(
    zygote: Zygote, engines: list[Engine], model: str
):
    pair = start_pair(zygote, model, kv_transfer_config=THEIRS)
    engines.extend(pair.engines())
    lengths = [1, 5 * 32 + 5, 200]
    for length in lengths:
        assert pair.check([prompt(length, seed=length)]).loaded == length - 1
    external = pair.decode.call("metrics")[SOURCES.format("external_kv_transfer")]
    assert external == sum(lengths) - len(lengths)
    assert pair.decode.call("connector_names") == ["DataDistConnector", "IdleConnector"]
