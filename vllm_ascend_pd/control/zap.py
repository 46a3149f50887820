# SPDX-License-Identifier: Apache-2.0
"""The gate of the peer plane: which CURVE client keys may connect (ZeroMQ RFC 27, "ZAP").

Lives in the control server's context and thread. libzmq asks it once per connection, after the client has proved
that it owns its key; without an answer nobody gets in (`ZAP_ENFORCE_DOMAIN`).
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

import zmq
from zmq.utils import z85

logger = logging.getLogger(__name__)

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"


class ZapGate:
    """Answers libzmq's questions on `sock`; `counters["denied"]` and `["admitted"]` count connections."""

    def __init__(self, context: Any, allowed_keys: set[bytes], counters: Counter[str]) -> None:
        self._allowed = frozenset(bytes(z85.decode(key)) for key in allowed_keys)
        self._counters = counters
        self.sock = context.socket(zmq.REP)
        self.sock.linger = 0
        try:
            self.sock.bind(ZAP_ENDPOINT)
        except BaseException:
            self.sock.close(0)
            raise

    def answer(self) -> None:
        """Answer all waiting questions."""
        while True:
            try:
                frames = self.sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.sock.send_multipart(self._judge(frames))

    def _judge(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        # version, request id, domain, address, identity, mechanism, client's public key
        if len(frames) == 7 and frames[5] == b"CURVE" and frames[6] in self._allowed:
            self._counters["admitted"] += 1
            return [b"1.0", request_id, b"200", b"OK", b"peer", b""]
        self._counters["denied"] += 1
        num_denied = self._counters["denied"]
        if num_denied & (num_denied - 1) == 0:  # 1, 2, 4, 8 ...: a stranger cannot fill the log
            logger.warning(
                "refused a control connection from %r: its key is not of this deployment's secret (%d so far)",
                frames[3] if len(frames) > 3 else b"?",
                num_denied,
            )
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]
