# SPDX-License-Identifier: Apache-2.0
"""The prefill rank's side of staging: gathers leased blocks into a slot when a decode rank asks.

Runs in the prefill worker's process: the control thread takes messages, the thread "pd-stage" copies, without the GIL
and off the step path. It knows no leases: the reader proves with its release, at the engine core, that the blocks
were leased the whole time; here it proves that the slot was its own until it had read it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict

import msgspec

from vllm_ascend_pd.control.server import ControlServer, Handler, Reply
from vllm_ascend_pd.plan.layout import CacheLayout
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.staging.buffer import GRANULES_PER_SLOT, SlotTable, StagingBuffer
from vllm_ascend_pd.transfer.staging.chunks import SLOT_BYTES, count_bytes, place
from vllm_ascend_pd.transfer.staging.copier import Copier
from vllm_ascend_pd.wire import LeaseVerdict, Refused, StageExtract, StageFree, StageSlot

logger = logging.getLogger(__name__)

HOLD_S = 10.0  # how long a reader may take to pull one slot
MAX_WAIT_S = 30.0
MAX_FREED = 1024


class StageServer:
    """Binds at once; `port` is what the rank's address tells the decode side."""

    def __init__(
        self,
        buffer: StagingBuffer,
        layout: CacheLayout,
        copier: Copier,
        secret: Secret,
        endpoint: tuple[str, str, int],
    ) -> None:
        """`endpoint`: local socket path, host, port (0: any)."""
        self._buffer = buffer
        self._layout = layout
        self._copier = copier
        self._slots = SlotTable(buffer.num_slots, HOLD_S)
        self._asked: queue.SimpleQueue[tuple[StageExtract, float] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._waiting: dict[str, list[Reply]] = {}
        self._answers: OrderedDict[str, StageSlot] = OrderedDict()
        self._freed: OrderedDict[str, LeaseVerdict] = OrderedDict()
        handlers: dict[type[msgspec.Struct], Handler] = {StageExtract: self._on_extract, StageFree: self._on_free}
        local_path, host, port = endpoint
        literal = f"[{host}]" if ":" in host else host
        self._server = ControlServer(local_path, f"tcp://{literal}:{port or '*'}", secret, handlers)
        self._thread = threading.Thread(target=self._run, name="pd-stage", daemon=True)
        self._server.start()
        self._thread.start()
        self.port = self._server.peer_port

    def problems(self) -> list[str]:
        """Threads that have ended without being asked to."""
        dead = [] if self._thread.is_alive() else [f"dead: thread {self._thread.name}"]
        return dead if self._server.alive() else [*dead, "dead: the staging control thread"]

    def close(self) -> None:
        """Stop answering; a copy that runs ends first."""
        self._server.close()
        self._asked.put(None)
        self._thread.join(timeout=10)

    # ---------------------------------------------------------------- control thread

    def _on_extract(self, message: StageExtract, reply: Reply) -> None:
        if not message.items:
            reply.send(StageSlot(first=0, num_bytes=0))
            return
        with self._lock:
            answer = self._answers.get(message.extract_id)
            if answer is None:
                waiting = self._waiting.setdefault(message.extract_id, [])
                waiting.append(reply)
                if len(waiting) == 1:
                    wait_s = min(message.deadline_ms / 1000, MAX_WAIT_S)
                    self._asked.put((message, time.monotonic() + wait_s))
                return
        reply.send(answer)

    def _on_free(self, message: StageFree, reply: Reply) -> None:
        with self._lock:
            verdict = self._freed.get(message.extract_id)
            if verdict is None:
                held = self._slots.free(message.extract_id)
                verdict = LeaseVerdict(held=held, state="released" if held else "expired")
                self._answers.pop(message.extract_id, None)
                self._freed[message.extract_id] = verdict
                while len(self._freed) > MAX_FREED:
                    self._freed.popitem(last=False)
        reply.send(verdict)

    # ---------------------------------------------------------------- staging thread

    def _run(self) -> None:
        while (item := self._asked.get()) is not None:
            message, deadline = item
            try:
                answer = self._extract(message, deadline)
            except ValueError as error:
                answer = Refused(code="staging_request", message=str(error))
            except Exception as error:  # one request's staging must not end everybody's
                logger.exception("extract %s failed", message.extract_id)
                answer = Refused(code="internal", message=f"{type(error).__name__}: {error}")
            with self._lock:
                replies = self._waiting.pop(message.extract_id, [])
                if isinstance(answer, StageSlot):
                    self._answers[message.extract_id] = answer
                    while len(self._answers) > MAX_FREED:
                        self._answers.popitem(last=False)
            for reply in replies:
                reply.send(answer)

    def _extract(self, message: StageExtract, deadline: float) -> StageSlot | Refused:
        parts = place(message.items, [item.blocks for item in message.items], self._layout)
        num_bytes = count_bytes(parts)
        if num_bytes > SLOT_BYTES:
            raise ValueError(f"{num_bytes} bytes asked for, a slot has {SLOT_BYTES}")
        slot = self._slots.take(message.extract_id, deadline)
        if slot is None:
            return Refused(code="staging_busy", message=f"all {self._buffer.num_slots} staging slots are in use")
        try:
            self._copier.extract(parts, self._buffer.address(slot), deadline + HOLD_S)
        finally:
            self._slots.filled(slot)
        return StageSlot(first=slot * GRANULES_PER_SLOT, num_bytes=num_bytes)
