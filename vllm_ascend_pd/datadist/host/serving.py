# SPDX-License-Identifier: Apache-2.0
"""Answers a peer's Read and Write requests on one link; runs in one thread per link.

A peer that has proved the secret may still be confused, so every range is checked against our own tables here,
never against what the peer believes. Caches that were registered after the link was made do not exist for it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from vllm_ascend_pd.datadist.host.channel import decode_message, send_message
from vllm_ascend_pd.datadist.host.framing import (
    BadFrame,
    PeerGone,
    receive_frame,
    receive_into,
    send_from,
    wait_frame_start,
)
from vllm_ascend_pd.datadist.host.link import Link, select_views
from vllm_ascend_pd.datadist.host.messages import Bye, DataReply, Read, Write
from vllm_ascend_pd.datadist.host.table import CacheTable, RegisteredCache
from vllm_ascend_pd.datadist.status import LLMException, LLMStatusCode, fail, require


def serve_link(link: Link, table: CacheTable, timeout_s: float) -> bool:
    """Serve until the link ends. True when the peer said farewell, False when it vanished.

    Raises BadFrame, ChannelTimeout (a peer that stops in the middle of a transfer).
    """
    sock = link.serve_sock
    while True:
        try:
            wait_frame_start(sock)
        except PeerGone:
            return False
        with link.serve_lock:
            deadline = time.monotonic() + timeout_s
            try:
                message = decode_message(receive_frame(sock, deadline))
                if isinstance(message, Bye):
                    return True
                if isinstance(message, Read):
                    _answer_read(link, table, message, deadline)
                elif isinstance(message, Write):
                    _answer_write(link, table, message, deadline)
                else:
                    raise BadFrame(f"{type(message).__name__} on an established link")
            except PeerGone:
                return False


def _answer_read(link: Link, table: CacheTable, request: Read, deadline: float) -> None:
    sock = link.serve_sock
    try:
        with _open(link, table, request) as cache:
            views = _views(cache, request)
            num_bytes = sum(request.sizes) * (request.tensor_stop - request.tensor_start)
            send_message(sock, DataReply(status=0, num_bytes=num_bytes), deadline)
            send_from(sock, views, deadline)
    except LLMException as error:
        send_message(sock, DataReply(status=error.status_code, reason=str(error)), deadline)


def _answer_write(link: Link, table: CacheTable, request: Write, deadline: float) -> None:
    sock = link.serve_sock
    try:
        with _open(link, table, request) as cache:
            views = _views(cache, request)
            send_message(sock, DataReply(status=0), deadline)
            receive_into(sock, views, deadline)
            send_message(sock, DataReply(status=0), deadline)
    except LLMException as error:
        send_message(sock, DataReply(status=error.status_code, reason=str(error)), deadline)


def _open(link: Link, table: CacheTable, request: Read | Write) -> AbstractContextManager[RegisteredCache]:
    if not 0 < request.cache_id <= link.last_local_cache_id:
        fail(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"cache_id {request.cache_id} is younger than the link")
    return table.use(request.cache_id)


def _views(cache: RegisteredCache, request: Read | Write) -> list[memoryview]:
    require(cache.accessible, f"cache_id {cache.cache_id} is not remote_accessible")
    start, stop = request.tensor_start, request.tensor_stop
    require(0 <= start < stop <= cache.num_tensors, f"tensors {start}..{stop} of a cache of {cache.num_tensors}")
    require(len(request.offsets) == len(request.sizes), "as many offsets as sizes are needed")
    for offset, size in zip(request.offsets, request.sizes, strict=True):
        inside = offset >= 0 and size > 0 and offset + size <= cache.tensor_bytes
        require(inside, f"run of {size} bytes at {offset} of a tensor of {cache.tensor_bytes} bytes")
    return select_views(cache.addresses[start:stop], cache.tensor_bytes, request.offsets, request.sizes)
