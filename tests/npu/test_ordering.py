# SPDX-License-Identifier: Apache-2.0
"""Order between streams, torch_npu's queue and the host. Each test runs once for each slowed stream.

Each right way passes under every slowed stream; its broken twin fails under the one that reveals it. A twin that
passed everywhere would mean that the test cannot fail.
"""

from __future__ import annotations

import pytest
import torch

from tests.npu.caches import are_same, make_layers, take_blocks, to_device
from tests.npu.standin import poll
from vllm_ascend_pd.npu import ops

IDS = [3, 4, 17, 9]
NO_KEEP_ALIVE, OVERTAKE_QUEUE, NO_EVENT, HOST_SYNC = 1, 2, 4, 8
both_streams = pytest.mark.parametrize("slowed", ["first", "second"])


class Streams:
    """Two streams; `hold` makes the one that this run slows start nothing until `let_go`."""

    def __init__(self, standin, slowed: str) -> None:
        self.first, self.second = torch.npu.Stream(), torch.npu.Stream()
        self._standin, self._slowed = standin, slowed

    def hold(self, copies_of: int | None = None) -> None:
        torch.npu.synchronize()
        self._standin.hold(getattr(self, self._slowed))
        if copies_of is not None:
            self._standin.hold_copies_of(copies_of)

    def let_go(self) -> None:
        self._standin.let_go()


@pytest.fixture
def streams(device, standin, slowed):
    return Streams(standin, slowed)


def prepare(layers, device):
    """What a group does once for all: it may wait for the device. Returns a staging buffer for IDS."""
    num_bytes = ops.compute_staging_bytes(layers, len(IDS))
    staging = torch.full((num_bytes,), 0x5A, dtype=torch.uint8).to(device)  # else it holds an earlier test's bytes
    ops.extract(layers, [], staging).synchronize()
    return staging


def read_back(layers) -> torch.Tensor:
    return take_blocks([tuple(tensor.cpu() for tensor in layer) for layer in layers], IDS)


def make_both(device, seed=0):
    host = make_layers("gqa", seed=seed)
    return host, to_device(host, device)


def pin(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def extract_then_read(device, streams, waits: bool) -> bool:
    host, layers = make_both(device)
    staging = prepare(layers, device)
    read = torch.zeros(staging.shape, dtype=torch.uint8, pin_memory=True)
    streams.hold()
    with torch.npu.stream(streams.first):
        event = ops.extract(layers, IDS, staging)
    with torch.npu.stream(streams.second):
        if waits:
            event.wait()
        read.copy_(staging, non_blocking=True)
    streams.let_go()
    torch.npu.synchronize()
    return torch.equal(read, take_blocks(host, IDS))


@both_streams
def test_a_reader_that_waits_for_the_event_sees_all_bytes(device, backend, streams, slowed):
    assert extract_then_read(device, streams, waits=True)


@both_streams
def test_a_reader_that_does_not_wait_is_found_out(device, backend, streams, slowed):
    assert extract_then_read(device, streams, waits=False) == (slowed == "second")


@both_streams
def test_an_event_that_is_not_recorded_is_found_out(device, defective, streams, slowed):
    defective(NO_EVENT)
    assert extract_then_read(device, streams, waits=True) == (slowed == "second")


def pull_then_inject(device, streams, waits: bool) -> bool:
    source, layers = make_layers("gqa", seed=5), to_device(make_layers("gqa", seed=6), device)
    pulled = pin(take_blocks(source, IDS))
    staging, over = prepare(layers, device), torch.npu.Event()
    streams.hold()
    with torch.npu.stream(streams.first):
        staging.copy_(pulled, non_blocking=True)
        over.record()
    with torch.npu.stream(streams.second):
        if waits:
            streams.second.wait_event(over)
        ops.inject(layers, IDS, staging)
    streams.let_go()
    torch.npu.synchronize()
    return torch.equal(read_back(layers), pulled)


@both_streams
def test_inject_after_the_pull_is_right(device, backend, streams, slowed):
    assert pull_then_inject(device, streams, waits=True)


@both_streams
def test_inject_before_the_pull_ended_is_found_out(device, backend, streams, slowed):
    assert pull_then_inject(device, streams, waits=False) == (slowed == "second")


def drop_staging(device, streams) -> bool:
    """Inject on the first stream; staging is dropped at once and the second stream fills memory of the same size."""
    source, layers = make_layers("gqa", seed=7), to_device(make_layers("gqa", seed=8), device)
    wanted = take_blocks(source, IDS)
    rubbish = pin(torch.full_like(wanted, 0x33))
    prepare(layers, device)
    with torch.npu.stream(streams.second):  # its memory belongs to the second stream's pool
        staging = wanted.to(device)
    streams.hold()
    with torch.npu.stream(streams.first):
        event = ops.inject(layers, IDS, staging)
    del staging
    with torch.npu.stream(streams.second):
        other = torch.empty(rubbish.shape, dtype=torch.uint8, device=device)
        other.copy_(rubbish, non_blocking=True)
    streams.let_go()
    event.synchronize()
    torch.npu.synchronize()
    return torch.equal(read_back(layers), wanted)


@both_streams
def test_staging_lives_until_the_event(device, backend, streams, slowed):
    assert drop_staging(device, streams)


@both_streams
def test_staging_that_is_freed_too_early_is_found_out(device, defective, streams, slowed):
    defective(NO_KEEP_ALIVE)
    assert drop_staging(device, streams) == (slowed == "second")


def queue_then_inject(device, streams) -> bool:
    """Everything on the first stream: order is the queue's alone. torch's copy is held while it is being posted."""
    source, layers = make_layers("gqa", seed=9), to_device(make_layers("gqa", seed=10), device)
    pulled = pin(take_blocks(source, IDS))
    staging = prepare(layers, device)
    streams.hold(copies_of=pulled.nbytes)
    with torch.npu.stream(streams.first):
        staging.copy_(pulled, non_blocking=True)
        ops.inject(layers, IDS, staging)
    streams.let_go()
    torch.npu.synchronize()
    return torch.equal(read_back(layers), pulled)


@both_streams
def test_inject_stays_behind_what_torch_queued(device, backend, streams, slowed):
    assert queue_then_inject(device, streams)


@both_streams
def test_a_call_that_overtakes_the_queue_is_found_out(device, defective, streams, slowed):
    defective(OVERTAKE_QUEUE)
    assert not queue_then_inject(device, streams)


def count_syncs(device, standin, streams) -> int:
    host, layers = make_both(device)
    staging = prepare(layers, device)
    streams.hold()
    with standin.counting() as counted, torch.npu.stream(streams.first):
        extracted = ops.extract(layers, IDS, staging)
        injected = ops.inject(layers, IDS, staging)
        streams.let_go()
        poll(extracted)
        poll(injected)
    assert are_same(layers, host)
    return counted["host_syncs"]


@both_streams
def test_nothing_makes_the_host_wait(device, standin, backend, streams, slowed):
    assert count_syncs(device, standin, streams) == 0


@both_streams
def test_a_host_sync_is_found_out(device, standin, defective, streams, slowed):
    defective(HOST_SYNC)
    assert count_syncs(device, standin, streams) > 0


@both_streams
def test_no_copy_touched_freed_memory_or_ran_over_its_end(device, standin, backend, streams, slowed):
    with standin.counting() as counted:
        assert extract_then_read(device, streams, waits=True)
        assert drop_staging(device, streams)
    assert (counted["use_after_free"], counted["out_of_bounds"]) == (0, 0)
