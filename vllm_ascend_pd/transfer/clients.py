# SPDX-License-Identifier: Apache-2.0
"""Control connections to prefill engine cores, one per address, the least recently used closed first.

Any thread. Every restart of a prefill instance may come at another port, so that what is behind an old address is
mostly gone; its connection would go on dialling for ever.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.secret import Secret

MAX_CLIENTS = 64  # far more than are in use at a time: one that is closed under way fails its request


class ClientTable:
    """Clients by (host, port), made at first use."""

    def __init__(self, secret: Secret, limit: int = MAX_CLIENTS) -> None:
        self._secret = secret
        self._limit = limit
        self._lock = threading.Lock()
        self._clients: OrderedDict[tuple[str, int], ControlClient] = OrderedDict()
        self._silent_at: dict[tuple[str, int], float] = {}

    def get(self, host: str, port: int) -> ControlClient:
        """The client for this address."""
        with self._lock:
            client = self._clients.pop((host, port), None)
            if client is None:
                literal = f"[{host}]" if ":" in host else host
                client = ControlClient(f"tcp://{literal}:{port}", self._secret)
            self._clients[host, port] = client
            oldest = None
            if len(self._clients) > self._limit:
                address, oldest = self._clients.popitem(last=False)
                self._silent_at.pop(address, None)
        if oldest is not None:
            oldest.close()
        return client

    def note_silence(self, host: str, port: int) -> None:
        """A request to this address was not answered."""
        with self._lock:
            self._silent_at[host, port] = time.monotonic()

    def was_silent_since(self, host: str, port: int, moment: float) -> bool:
        """Whether silence was noted after `moment` (monotonic).

        What has been in a queue since then is given up: one dead prefill engine must not hold up the living ones by a
        timeout for each of its requests.
        """
        with self._lock:
            return self._silent_at.get((host, port), float("-inf")) > moment

    def close(self) -> None:
        """Drop all connections."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()
