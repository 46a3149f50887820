# SPDX-License-Identifier: Apache-2.0
"""One link to one peer: a channel for our requests, a channel for the peer's, the peer's caches as they were
when the link was made, and the mappings of its arenas.

One transfer at a time: the mutex covers a whole pull or push, and waiting for it counts against the caller's
deadline. After a timeout or the peer's death the link is spoiled: every later call is LLM_NOT_YET_LINK until
it is unlinked and linked again. The mutex and `serve_lock` are never held together.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from vllm_ascend_pd.datadist.host.channel import receive_message, send_message
from vllm_ascend_pd.datadist.host.copying import CopyDeadline, copy_runs
from vllm_ascend_pd.datadist.host.framing import (
    BadFrame,
    ChannelError,
    ChannelTimeout,
    PeerGone,
    cut,
    poll_idle,
    receive_into,
    send_from,
)
from vllm_ascend_pd.datadist.host.messages import Bye, CacheEntry, DataReply, Read, Write
from vllm_ascend_pd.datadist.host.runs import Runs
from vllm_ascend_pd.datadist.status import LLMStatusCode, fail, to_status
from vllm_ascend_pd.memory.mapping import SharedMapping

logger = logging.getLogger(__name__)

_FAREWELL_S = 0.2


class _PeerUnlinked(ChannelError):
    """The peer tore the link down in an orderly way."""


def view_memory(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at an address; nothing is touched, nothing kept alive."""
    array: Any = (ctypes.c_char * num_bytes).from_address(address)
    return memoryview(array).cast("B")


def select_views(
    addresses: Sequence[int], tensor_bytes: int, offsets: Sequence[int], sizes: Sequence[int]
) -> list[memoryview]:
    """For each tensor, for each run: its bytes."""
    views: list[memoryview] = []
    for address in addresses:
        tensor = view_memory(address, tensor_bytes)
        views += [tensor[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
    return views


def check_entries(entries: Sequence[CacheEntry], mappings: dict[int, SharedMapping] | None) -> None:
    """Raise BadFrame unless a peer's caches make sense and lie inside what it passed."""
    for entry in entries:
        tensors = entry.num_tensors
        shaped = tensors > 0 and 0 < entry.num_slots <= entry.tensor_bytes < 2**62
        placed = len(entry.arena_ids) == len(entry.arena_offsets) == (tensors if entry.accessible else 0)
        if not shaped or not placed:
            raise BadFrame(f"cache {entry.cache_id} of the peer makes no sense")
        for number, offset in zip(entry.arena_ids, entry.arena_offsets, strict=True):
            mapping = (mappings or {}).get(number)
            if mapping and not 0 <= offset <= mapping.num_bytes - entry.tensor_bytes:
                raise BadFrame(f"cache {entry.cache_id} of the peer is outside its arena {number}")


class Link:
    """A usable link; made by `dialling` or `accepting`."""

    def __init__(
        self,
        cluster_id: int,
        request_sock: socket.socket,
        serve_sock: socket.socket,
        entries: list[CacheEntry],
        mappings: dict[int, SharedMapping] | None,
        last_local_cache_id: int,
    ) -> None:
        self.cluster_id = cluster_id
        self.entries = entries
        self.last_local_cache_id = last_local_cache_id
        self.serve_sock = serve_sock
        self.serve_lock = threading.Lock()  # held while an answer is on its way
        self._request_sock = request_sock
        self._mappings = mappings
        self._mutex = threading.Lock()  # one transfer at a time
        self._spoiled_by = ""  # why it is of no use any more

    @property
    def is_live(self) -> bool:
        """False once spoiled or closed."""
        return self._spoiled_by == ""

    @property
    def transport(self) -> str:
        """How bytes come from this peer: `mapped` when all it serves is mapped here, else `tcp`."""
        if self._mappings is None:
            return "tcp"
        served = [entry for entry in self.entries if entry.accessible]
        return "mapped" if all(self._is_mapped(entry) for entry in served) else "tcp"

    def _is_mapped(self, entry: CacheEntry) -> bool:
        return self._mappings is not None and all(number in self._mappings for number in entry.arena_ids)

    @contextmanager
    def transfer(self, deadline: float) -> Iterator[None]:
        """Hold the link for one transfer. Raises LLMException: LLM_TIMEOUT, LLM_NOT_YET_LINK."""
        if not self._mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._spoil("timeout while queueing")
            fail(LLMStatusCode.LLM_TIMEOUT, f"cluster {self.cluster_id}: timeout while another transfer runs")
        try:
            if self._spoiled_by:
                fail(
                    LLMStatusCode.LLM_NOT_YET_LINK,
                    f"cluster {self.cluster_id}: unlink and link again ({self._spoiled_by})",
                )
            yield
        finally:
            self._mutex.release()

    def read(
        self,
        entry: CacheEntry,
        runs: Runs,
        dst_addresses: Sequence[int],
        dst_tensor_bytes: int,
        deadline: float,
    ) -> None:
        """Inside `transfer`: peer's bytes to local tensors. Raises LLMException."""
        with self._translate_errors():
            self._check_peer()
            addresses = [dst_addresses[tensor] for tensor in runs.dst_tensors]
            if self._is_mapped(entry):
                self._copy(entry, runs, addresses, deadline)
                self._check_peer()  # gone: its memory may be stale, the bytes do not count
                return
            message = Read(
                cache_id=entry.cache_id,
                tensor_start=runs.src_tensors.start,
                tensor_stop=runs.src_tensors.stop,
                offsets=runs.src_offsets,
                sizes=runs.sizes,
            )
            send_message(self._request_sock, message, deadline)
            reply = receive_message(self._request_sock, DataReply, deadline)
            self._check_reply(reply)
            if reply.num_bytes != runs.num_bytes:
                raise BadFrame(f"{reply.num_bytes} bytes announced, {runs.num_bytes} wanted")
            views = select_views(addresses, dst_tensor_bytes, runs.dst_offsets, runs.sizes)
            receive_into(self._request_sock, views, deadline)

    def _copy(self, entry: CacheEntry, runs: Runs, addresses: list[int], deadline: float) -> None:
        assert self._mappings is not None
        bases = [
            self._mappings[entry.arena_ids[tensor]].address + entry.arena_offsets[tensor] for tensor in runs.src_tensors
        ]
        copy_runs(
            [base + offset for base in addresses for offset in runs.dst_offsets],
            [base + offset for base in bases for offset in runs.src_offsets],
            runs.sizes * len(bases),
            deadline,
        )

    def write(
        self,
        entry: CacheEntry,
        runs: Runs,
        src_addresses: Sequence[int],
        src_tensor_bytes: int,
        deadline: float,
    ) -> None:
        """Inside `transfer`: local bytes to the peer's tensors. Raises LLMException."""
        with self._translate_errors():
            self._check_peer()
            message = Write(
                cache_id=entry.cache_id,
                tensor_start=runs.dst_tensors.start,
                tensor_stop=runs.dst_tensors.stop,
                offsets=runs.dst_offsets,
                sizes=runs.sizes,
            )
            send_message(self._request_sock, message, deadline)
            addresses = [src_addresses[tensor] for tensor in runs.src_tensors]
            self._check_reply(receive_message(self._request_sock, DataReply, deadline))
            views = select_views(addresses, src_tensor_bytes, runs.src_offsets, runs.sizes)
            send_from(self._request_sock, views, deadline)
            self._check_reply(receive_message(self._request_sock, DataReply, deadline))

    def _check_reply(self, reply: DataReply) -> None:
        if reply.status != LLMStatusCode.LLM_SUCCESS:
            fail(to_status(reply.status), f"cluster {self.cluster_id} refused: {reply.reason}")

    def _check_peer(self) -> None:
        if poll_idle(self._request_sock):
            return
        try:
            receive_message(self._request_sock, Bye, time.monotonic() + _FAREWELL_S)
        except ChannelTimeout as error:
            raise BadFrame("the peer spoke unasked") from error
        raise _PeerUnlinked("the peer has torn the link down")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except _PeerUnlinked as error:
            self._end(LLMStatusCode.LLM_NOT_YET_LINK, error)
        except (ChannelTimeout, CopyDeadline, PeerGone) as error:
            self._end(LLMStatusCode.LLM_TIMEOUT, error)
        except BadFrame as error:
            self._end(LLMStatusCode.LLM_FAILED, error)
        except OSError as error:
            fail(LLMStatusCode.LLM_FAILED, f"cluster {self.cluster_id}: {error}")

    def _end(self, status: LLMStatusCode, error: Exception) -> NoReturn:
        self._spoil(str(error))
        fail(status, f"cluster {self.cluster_id}: {error}")

    def _spoil(self, reason: str) -> None:
        if not self._spoiled_by:
            self._spoiled_by = reason
            logger.warning("cluster_id=%d: link spoiled: %s", self.cluster_id, reason)

    def close(self, timeout_s: float, reason: str) -> None:
        """Tear down this side: waits for the transfer that runs, says farewell, ends both channels.

        The thread that serves the link closes that channel's descriptor.
        """
        free = self._mutex.acquire(timeout=timeout_s)
        try:
            self._spoiled_by = self._spoiled_by or reason
            self._say_bye(self._request_sock, free)
            if free:
                self._request_sock.close()
        finally:
            if free:
                self._mutex.release()
        free = self.serve_lock.acquire(timeout=timeout_s)
        try:
            self._say_bye(self.serve_sock, free)
        finally:
            if free:
                self.serve_lock.release()

    def _say_bye(self, sock: socket.socket, is_idle: bool) -> None:
        if is_idle:  # in the middle of a transfer the word would be taken for data
            try:
                send_message(sock, Bye(), time.monotonic() + _FAREWELL_S)
            except (ChannelError, OSError):
                pass  # the peer is gone already
        cut(sock)
