# SPDX-License-Identifier: Apache-2.0
"""F72: somebody reaches a side channel and sends a pickled object that would touch a file.

Must: rejected and counted. Was: the code ran.
"""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.builders import decode_sampling, prompt
from tests.e2e.engines import ROOT, Engine, Zygote
from tests.e2e.pairs import Counts, Pair, prefill_leg
from tests.field.conftest import BLOCK
from tests.field.peer import cancel, secret_of
from vllm_ascend_pd.secret import Secret

BANNED = ("pickle", "recv_pyobj", "send_pyobj", "cloudpickle", "marshal", "eval(", "exec(")


class Canary:
    """Unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    path = tmp_path / "canary"
    bird = pickle.dumps(Canary(path))
    pickle.loads(bird)  # it would work
    path.rmdir()
    return path


def still_serves(pair: Pair, canary: Path) -> None:
    assert not canary.exists()
    pair.check([prompt(40, seed=1)])


@pytest.mark.engine
def test_f72_a_pickle_on_the_peer_plane_without_the_secret_is_not_even_read(pair: Pair, canary: Path):
    port = pair.prefill.status()["peer_port"]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(pickle.dumps(Canary(canary)) * 100)
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)  # no CURVE
        plain.linger = 0
        plain.connect(f"tcp://127.0.0.1:{port}")
        plain.send(pickle.dumps(Canary(canary)))
        assert plain.poll(1000) == 0
        plain.close(0)
    finally:
        context.term()
    still_serves(pair, canary)


@pytest.mark.engine
def test_f72_a_pickle_from_a_holder_of_the_secret_is_refused_and_counted(zygote: Zygote, pair: Pair, canary: Path):
    secret = secret_of(zygote)
    before = malformed(pair.prefill)
    context = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        use_curve(peer, secret)
        peer.connect(f"tcp://127.0.0.1:{pair.prefill.status()['peer_port']}")
        peer.send_multipart([b"\0" * 8, pickle.dumps(Canary(canary))])
        peer.send(pickle.dumps(Canary(canary)))
        pair.prefill.wait_until(lambda s: s["malformed"] >= before + 2, "two malformed frames counted")
        peer.close(0)
    finally:
        context.term()
    still_serves(pair, canary)


@pytest.mark.engine
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_f72_a_pickle_on_the_local_plane_is_refused_and_counted(pair: Pair, canary: Path, role: str):
    engine: Engine = getattr(pair, role)
    before = malformed(engine)
    context = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.linger = 0
        client.connect(engine.status()["core_address"])
        client.send_multipart([b"\0" * 8, pickle.dumps(Canary(canary))])
        engine.wait_until(lambda s: s["malformed"] >= before + 1, "a malformed frame counted")
        client.close(0)
    finally:
        context.term()
    still_serves(pair, canary)


@pytest.mark.engine
def test_f72_a_pickle_on_the_data_plane_is_refused(pair: Pair, canary: Path):
    link = pair.prefill.status()["pd"]["links"][0]
    with socket.create_connection((link["host"], link["port"]), timeout=5) as raw:
        raw.sendall(pickle.dumps(Canary(canary)) * 1000)
        raw.settimeout(10)
        try:
            while raw.recv(4096):
                pass
        except ConnectionResetError:
            pass
    still_serves(pair, canary)


@pytest.mark.engine
@pytest.mark.parametrize("field", ["host", "port", "lease_id", "epoch", "num_tokens", "block_ids", "layout"])
def test_f72_a_changed_field_of_a_handoff_is_noticed_and_its_address_not_dialled(
    zygote: Zygote, pair: Pair, field: str
):
    """A client forges a handoff: only addresses that the signature covers are dialled."""
    tokens = prompt(2 * BLOCK + 1, seed=3)
    (params,) = prefill_leg(pair.prefill, [tokens])
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.5)
        forged = {
            "host": "127.0.0.2",
            "port": trap.getsockname()[1],
            "lease_id": "0" * 16,
            "epoch": "other",
            "num_tokens": 2 * BLOCK,
            "block_ids": [[5, 6, 7]],
            "layout": "0" * 16,
        }[field]
        changed = {**params, "pd_handoff": {**params["pd_handoff"], field: forged}}
        before = Counts.of(pair.decode)
        answer = pair.decode.generate([tokens], [decode_sampling(changed)])[0].token_ids
        took = Counts.of(pair.decode).since(before)
        assert [answer] == pair.expected([tokens])
        assert (took.loaded, took.failures) == (0, {"handoff": 1})
        with pytest.raises(TimeoutError):
            trap.accept()
    cancel(pair.prefill, secret_of(zygote), [params["pd_handoff"]["transfer_id"]])


def test_f72_a_frame_that_is_no_message_of_ours_does_not_decode():
    from vllm_ascend_pd.wire import PeerMessage

    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(pickle.dumps({"type": "hello"}), type=PeerMessage)


def test_f72_nothing_of_ours_unpickles_or_evaluates():
    offenders = []
    for path in [*(ROOT / "vllm_ascend_pd").rglob("*.py"), *(ROOT / "vllm").rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            if any(word in code for word in BANNED) and '"""' not in line and "import" in code or "recv_pyobj" in code:
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert offenders == []


def malformed(engine: Engine) -> int:
    return int(engine.status()["malformed"])


def use_curve(sock, secret: Secret) -> None:
    """As the product's own client does."""
    sock.curve_publickey, sock.curve_secretkey = secret.curve_client_keys()
    sock.curve_serverkey = secret.curve_server_keys()[0]
