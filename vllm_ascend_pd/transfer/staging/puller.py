# SPDX-License-Identifier: Apache-2.0
"""The decode rank's side of staging: ask for extracts, pull slots, inject. Runs in the pull threads.

While one slot is pulled the next one is being extracted: one message is always on its way, by a thread of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.datadist.outcomes import PULL, judge
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.plan.layout import CacheLayout
from vllm_ascend_pd.transfer.staging.buffer import GRANULES_PER_SLOT, StagingBuffer
from vllm_ascend_pd.transfer.staging.chunks import GRANULE_BYTES, SLOT_BYTES, Chunk, Part, place
from vllm_ascend_pd.transfer.staging.copier import Copier, StagingError
from vllm_ascend_pd.transfer.staging.cost import LinkModel, Probe, fit
from vllm_ascend_pd.wire import LeaseVerdict, StageExtract, StageFree, StageSlot

logger = logging.getLogger(__name__)

ASK_ATTEMPTS = 3
ABANDON_TIMEOUT_S = 1.0
PROBE_PIECES = 256
PROBE_LARGE_BYTES = 4 << 20
PROBE_TIMEOUT_S = 10.0


@dataclass
class StagedTimes:
    """Seconds per stage of one staged transfer, summed over its chunks."""

    extract_s: float = 0.0  # waiting for the prefill side, what is hidden behind pulls not counted
    pull_s: float = 0.0
    inject_s: float = 0.0


class StagedPuller:
    """One decode rank's staged pulls, over all its links."""

    def __init__(self, buffer: StagingBuffer, layout: CacheLayout, copier: Copier, manager: Any, module: Any) -> None:
        self._buffer = buffer
        self._layout = layout
        self._copier = copier
        self._manager = manager
        self._module = module
        self._withheld = threading.local()  # slots by cluster id, of the pull thread that they failed in
        self._asker = ThreadPoolExecutor(buffer.num_slots, "pd-stage-ask")

    def close(self) -> None:
        """Wait for what is being asked."""
        self._asker.shutdown(wait=True, cancel_futures=True)

    def pull(self, chunks: Sequence[Chunk], client: ControlClient, cluster_id: int, deadline: float) -> StagedTimes:
        """Move all chunks. Raises StagingError, PDUnreachableError, LLMException."""
        times = StagedTimes()
        asked = self._ask(chunks[0], client, deadline)
        try:
            for index, chunk in enumerate(chunks):
                started = time.monotonic()
                extract_id, answer = asked.result()
                times.extract_s += time.monotonic() - started
                if index + 1 < len(chunks):
                    asked = self._ask(chunks[index + 1], client, deadline)
                self._take(chunk, extract_id, answer, (client, cluster_id), times, deadline)
        except BaseException:
            self._abandon(asked, client)
            raise
        return times

    @contextmanager
    def _slot(self, deadline: float, cluster_id: int) -> Iterator[int]:
        """A slot that this thread keeps after a failure that leaves its link undefined: bytes may still be coming."""
        kept: list[int] = []

        def keeps(error: BaseException) -> bool:
            if isinstance(error, self._module.LLMException) and judge(PULL, error.status_code).spoils:
                self._withheld_here().setdefault(cluster_id, []).append(kept[0])
                return True
            return False

        with self._buffer.slot(deadline, keeps) as slot:
            kept.append(slot)
            yield slot

    def take_withheld(self, cluster_id: int) -> list[int]:
        """The slots that this thread keeps because of that link: they are the caller's now."""
        return self._withheld_here().pop(cluster_id, [])

    def put_back(self, slots: Sequence[int]) -> None:
        """The link that they were kept for is down: they may be used again."""
        for slot in slots:
            self._buffer.put(slot)

    def _withheld_here(self) -> dict[int, list[int]]:
        if not hasattr(self._withheld, "slots"):
            self._withheld.slots = {}
        slots: dict[int, list[int]] = self._withheld.slots
        return slots

    def _take(
        self,
        chunk: Chunk,
        extract_id: str,
        answer: StageSlot,
        link: tuple[ControlClient, int],
        times: StagedTimes,
        deadline: float,
    ) -> None:
        client, cluster_id = link
        if time.monotonic() > deadline:
            raise StagingError("deadline: too little lease time was left for the next slot")
        with self._slot(deadline, cluster_id) as slot:
            self._move(chunk, answer, slot, cluster_id, times)
            self._free(extract_id, client, deadline)
            started = time.monotonic()
            parts = place(chunk.items, chunk.dst_blocks, self._layout)
            self._copier.inject(parts, self._buffer.address(slot), deadline)
            times.inject_s += time.monotonic() - started

    def _abandon(self, asked: Future[tuple[str, StageSlot]], client: ControlClient) -> None:
        """A slot that comes after all is given back; the prefill side would hold it until its time is over."""

        def give_back(done: Future[tuple[str, StageSlot]]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            try:
                client.request(StageFree(extract_id=done.result()[0]), ABANDON_TIMEOUT_S, 1)
            except PDError as error:
                logger.debug("an abandoned staging slot was not given back: %s", error)

        asked.add_done_callback(give_back)

    def _move(self, chunk: Chunk, answer: StageSlot, slot: int, cluster_id: int, times: StagedTimes) -> None:
        if answer.num_bytes != chunk.num_bytes:
            raise StagingError(f"staging: {answer.num_bytes} bytes were extracted, {chunk.num_bytes} are wanted")
        started = time.monotonic()
        first = slot * GRANULES_PER_SLOT
        granules = range(chunk.num_granules)
        self._pull([answer.first + i for i in granules], [first + i for i in granules], cluster_id)
        times.pull_s += time.monotonic() - started

    def _pull(self, src: list[int], dst: list[int], cluster_id: int) -> None:
        key = self._module.BlocksCacheKey(cluster_id, self._buffer.model_id)
        layers = range(1)
        self._manager.pull_blocks(
            key, self._buffer.cache, src, dst, src_layer_range=layers, dst_layer_range=layers, tensor_num_per_layer=1
        )

    def _ask(self, chunk: Chunk, client: ControlClient, deadline: float) -> Future[tuple[str, StageSlot]]:
        return self._asker.submit(self._extract, chunk, client, deadline)

    def _extract(self, chunk: Chunk, client: ControlClient, deadline: float) -> tuple[str, StageSlot]:
        left_s = max(0.001, deadline - time.monotonic())
        extract_id = secrets.token_hex(16)
        message = StageExtract(extract_id=extract_id, items=chunk.items, deadline_ms=round(1000 * left_s))
        answer = client.request(message, left_s, ASK_ATTEMPTS)
        if not isinstance(answer, StageSlot):
            raise StagingError(f"staging: {getattr(answer, 'message', answer)}")
        return extract_id, answer

    def _free(self, extract_id: str, client: ControlClient, deadline: float) -> None:
        left_s = max(0.001, deadline - time.monotonic())
        verdict = client.request(StageFree(extract_id=extract_id), left_s, ASK_ATTEMPTS)
        if not isinstance(verdict, LeaseVerdict) or not verdict.held:
            raise StagingError("staging: the slot was given to another reader before it had been read")

    # ---------------------------------------------------------------- the probe

    def measure(self, client: ControlClient, cluster_id: int) -> LinkModel:
        """Probe a new link: some 8 MiB are read, their bytes are dropped. Raises as `pull`."""
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        with self._slot(deadline, cluster_id) as slot:
            first = slot * GRANULES_PER_SLOT
            spread = [2 * i for i in range(PROBE_PIECES)]
            large = list(range(PROBE_LARGE_BYTES // GRANULE_BYTES))

            def pull(offsets: list[int]) -> None:
                self._pull(offsets, [first + i for i in offsets], cluster_id)

            def ask() -> None:
                client.request(StageExtract(extract_id="", items=(), deadline_ms=1000), PROBE_TIMEOUT_S, 1)

            return fit(
                Probe(
                    pull_one=lambda: pull([0]),
                    pull_scattered=lambda: pull(spread),
                    pull_large=lambda: pull(large),
                    ask=ask,
                    copy_large=lambda: self._copy_within(slot, deadline),
                    small_bytes=GRANULE_BYTES,
                    num_pieces=PROBE_PIECES,
                    large_bytes=PROBE_LARGE_BYTES,
                )
            )

    def _copy_within(self, slot: int, deadline: float) -> None:
        """As an inject does: from one half of the slot to blocks spread over the other."""
        count = PROBE_LARGE_BYTES // GRANULE_BYTES
        base = self._buffer.address(slot)
        spread = tuple((7 * i) % count for i in range(count))
        self._copier.inject([Part((base + SLOT_BYTES // 2,), GRANULE_BYTES, spread, 0)], base, deadline)
