# SPDX-License-Identifier: Apache-2.0
"""What an API server process keeps for PD beside its engine client: one `Instance`, in both roles.

Made at the first use on the event loop, closed with the engine client. Every API server of an instance has its
own; all of them talk to the one engine core over its local socket.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.control.client import AsyncControlClient
from vllm_ascend_pd.errors import PDHandoffError
from vllm_ascend_pd.front.ask import AskClient
from vllm_ascend_pd.front.drain import DrainSwitch
from vllm_ascend_pd.front.front import Background, EnginePort, PrefillFront
from vllm_ascend_pd.front.metrics import get_metrics
from vllm_ascend_pd.front.pool import PrefillPool
from vllm_ascend_pd.front.remote import Services
from vllm_ascend_pd.front.server import PrefillServer
from vllm_ascend_pd.front.watch import PoolWatcher
from vllm_ascend_pd.handoff import prompt_digest, verify_handoff
from vllm_ascend_pd.secret import RequestVerifier, Secret, load_secret
from vllm_ascend_pd.wire import Handoff


class Instance:
    """`front`, `pool` and `watcher` exist on a decode instance, `server` on a prefill one."""

    def __init__(self, config: PDConfig, engine: EnginePort) -> None:
        self.config = config
        self.background = Background()
        secret = load_secret(config.secret_file or None)
        self.core = AsyncControlClient(config.core_address)
        self.front: PrefillFront | None = None
        self.watcher: PoolWatcher | None = None
        self.server: PrefillServer | None = None
        self._is_watching = False
        self.drain = DrainSwitch(config.runtime_dir, RequestVerifier(secret, audience=config.epoch))
        if config.role is PDRole.PREFILL:
            self.server = PrefillServer(config, secret, self.core, self.drain)
            return
        metrics = get_metrics()
        metrics.register()
        pool = PrefillPool(config.static_prefill_urls)
        asker = AskClient(secret)
        self.watcher = PoolWatcher(config, pool, asker, self.core)
        services = Services(
            config=config,
            core=self.core,
            asker=asker,
            pool=pool,
            metrics=metrics,
            check_handoff=functools.partial(check_handoff, secret),
            spawn=self.background.spawn,
        )
        self.front = PrefillFront(services, engine, self.background)

    def start_watching(self) -> None:
        """Keep probing the prefill instances from now on. Repeatable."""
        if self.watcher is not None and not self._is_watching:
            self._is_watching = True
            self.background.spawn(self.watcher.run())

    def to_status(self) -> dict[str, Any]:
        """This API server's own part of /pd/status."""
        if self.front is not None:
            return self.front.to_status()
        assert self.server is not None
        return self.server.to_status()

    def close(self) -> None:
        """Stop background work. Any thread; the event loop may have ended."""
        self.background.cancel_all()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # the sockets go with the process
        self.core.close()


def check_handoff(secret: Secret, handoff: Handoff, token_ids: list[int]) -> None:
    """Whether the deployment signed this handoff, and for the head of these tokens.

    Raises:
        PDHandoffError: it did not, or the handoff covers too little.
    """
    verify_handoff(handoff, secret)
    if not len(token_ids) - 1 <= handoff.num_tokens <= len(token_ids):
        raise PDHandoffError(f"num_tokens: {handoff.num_tokens} in the handoff, {len(token_ids)} in the prompt")
    if prompt_digest(token_ids[: handoff.num_tokens]) != handoff.prompt_digest:
        raise PDHandoffError("prompt_digest: the handoff was made for another prompt")
