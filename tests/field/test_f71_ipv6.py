# SPDX-License-Identifier: Apache-2.0
"""F71: IPv6 literal hosts.

Must: they work, or a clear error. Was: failed, or mispaired lists of hosts and ports. Our flags take whole URLs, so
there are no two lists that could differ in length.
"""

from __future__ import annotations

import socket

import pytest

from tests.builders import prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import prefill_leg, start_pair
from tests.field.conftest import BLOCK, MODEL, SMALL_POOL_BYTES
from vllm_ascend_pd.config import parse_listen, parse_prefill_url
from vllm_ascend_pd.errors import PDConfigError


def has_ipv6() -> bool:
    """Whether ::1 can be bound here."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://[::1]:8100", "http://[::1]:8100"),
        ("http://[fe80::1%eth0]:8100/", "http://[fe80::1%eth0]:8100"),
        ("http://[2001:DB8::2]:80", "http://[2001:db8::2]:80"),
    ],
)
def test_f71_a_literal_in_a_url_is_taken(text: str, url: str):
    assert parse_prefill_url(text, "--pd-prefill") == url


@pytest.mark.parametrize("text", ["http://::1:8100", "http://[::1", "http://[::1]", "http://[::g]:8100", "[::1]:8100"])
def test_f71_a_malformed_literal_is_refused_by_name(text: str):
    with pytest.raises(PDConfigError, match="--pd-prefill"):
        parse_prefill_url(text, "--pd-prefill")


@pytest.mark.parametrize(
    ("text", "expected"), [("::1", ("::1", 0)), ("[::1]", ("::1", 0)), ("[::1]:8200", ("::1", 8200))]
)
def test_f71_a_literal_to_listen_on_is_taken(text: str, expected: tuple[str, int]):
    assert parse_listen(text, "--pd-listen") == expected


@pytest.mark.engine
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_f71_a_pair_over_ipv6_loopback(zygote: Zygote, engines: list[Engine]):
    pair = start_pair(zygote, MODEL, kv_cache_memory_bytes=SMALL_POOL_BYTES, prefill={"pd_listen": "[::1]"})
    engines.extend(pair.engines())
    tokens = prompt(2 * BLOCK + 5, seed=1)
    assert pair.check([tokens]).loaded == len(tokens) - 1
    (params,) = prefill_leg(pair.prefill, [tokens])
    assert params["remote_host"] == "::1"
