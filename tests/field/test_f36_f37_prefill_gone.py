# SPDX-License-Identifier: Apache-2.0
"""F36 and F37: the prefill engine dies between the legs, or its control channel answers garbage.

Must: the request ends in bounded time and its blocks come back. Was: waits for ever, health stays green.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.builders import engine_kwargs, prompt
from tests.e2e.engines import Engine, Zygote
from tests.e2e.pairs import Counts, Pair, decode_leg, prefill_leg
from tests.field.conftest import BLOCK, MODEL, SMALL_POOL_BYTES
from tests.field.peer import cancel, secret_of
from vllm_ascend_pd.handoff import from_kv_transfer_params, sign_handoff

BOUND_S = 40.0

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("known", [False, True], ids=["never linked", "linked before"])
def test_f36_prefill_killed_between_the_legs_ends_in_bounded_time(
    zygote: Zygote, engines: list[Engine], pair: Pair, known: bool
):
    arguments = engine_kwargs(MODEL, pd_role="prefill", kv_cache_memory_bytes=SMALL_POOL_BYTES)
    victim = zygote.start("victim", arguments, core=1)
    engines.append(victim)
    if known:
        first = prompt(2 * BLOCK, seed=1)
        decode_leg(pair.decode, [first], prefill_leg(victim, [first]))
    tokens = [prompt(3 * BLOCK + number, seed=2 + number) for number in range(3)]
    params = prefill_leg(victim, tokens)
    victim.kill()
    before = Counts.of(pair.decode)
    started = time.monotonic()
    answers = [r.token_ids for r in decode_leg(pair.decode, tokens, params)]
    assert time.monotonic() - started < BOUND_S
    took = Counts.of(pair.decode).since(before)
    assert answers == pair.expected(tokens)
    assert (took.loaded, sum(took.failures.values())) == (0, 3)
    assert pair.decode.status()["problems"] == []
    pair.check([prompt(40, seed=9)])  # others are served as before


@pytest.fixture
def garbage_port() -> Iterator[int]:
    """Something that listens, and answers every connection with bytes that are no ZeroMQ greeting."""
    server = socket.create_server(("127.0.0.1", 0))
    stopping = threading.Event()

    def answer() -> None:
        while not stopping.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(range(256)))
                except OSError:
                    continue

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    stopping.set()
    server.close()


def test_f37_a_control_channel_that_answers_garbage_ends_the_load_in_bounded_time(
    zygote: Zygote, pair: Pair, garbage_port: int
):
    tokens = prompt(3 * BLOCK + 1, seed=20)
    params = forged_address(zygote, prefill_leg(pair.prefill, [tokens])[0], garbage_port)
    check_bounded_recompute(zygote, pair, tokens, params)


def test_f37_a_control_channel_that_refuses_connections_ends_the_load_in_bounded_time(zygote: Zygote, pair: Pair):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    tokens = prompt(3 * BLOCK + 1, seed=21)
    params = forged_address(zygote, prefill_leg(pair.prefill, [tokens])[0], port)
    check_bounded_recompute(zygote, pair, tokens, params)


def forged_address(zygote: Zygote, params: dict, port: int) -> dict:
    """The handoff with another control port, properly signed: as if that were where its engine listens."""
    handoff = from_kv_transfer_params(params)
    assert handoff is not None
    moved = sign_handoff(msgspec.structs.replace(handoff, port=port, signature=""), secret_of(zygote))
    return {**params, "remote_port": port, "pd_handoff": msgspec.to_builtins(moved)}


def check_bounded_recompute(zygote: Zygote, pair: Pair, tokens: list[int], params: dict) -> None:
    """The load fails, the tokens are right, and the lease that nobody read is cancelled by hand."""
    before = Counts.of(pair.decode)
    started = time.monotonic()
    answer = decode_leg(pair.decode, [tokens], [params])[0].token_ids
    assert time.monotonic() - started < BOUND_S
    took = Counts.of(pair.decode).since(before)
    assert [answer] == pair.expected([tokens])
    assert (took.loaded, sum(took.failures.values())) == (0, 1)
    cancel(pair.prefill, secret_of(zygote), [params["pd_handoff"]["transfer_id"]])
