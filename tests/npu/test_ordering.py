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


@pytest.fixture
def streams(device, standin, slowed):
    """Two streams, one of them slow."""
    made = {"first": torch.npu.Stream(), "second": torch.npu.Stream()}
    standin.slow(made[slowed])
    return made["first"], made["second"]


def make_both(device, seed=0):
    host = make_layers("gqa", seed=seed)
    return host, to_device(host, device)


def pin(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def extract_then_read(device, streams, waits: bool) -> bool:
    host, layers = make_both(device)
    staging = torch.empty(ops.compute_staging_bytes(layers, len(IDS)), dtype=torch.uint8, device=device)
    read = torch.zeros(staging.shape, dtype=torch.uint8, pin_memory=True)
    first, second = streams
    torch.npu.synchronize()
    with torch.npu.stream(first):
        event = ops.extract(layers, IDS, staging)
    with torch.npu.stream(second):
        if waits:
            event.wait()
        read.copy_(staging, non_blocking=True)
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
    staging = torch.empty(pulled.shape, dtype=torch.uint8, device=device)
    first, second = streams
    torch.npu.synchronize()
    with torch.npu.stream(first):
        staging.copy_(pulled, non_blocking=True)
        over = torch.npu.Event()
        over.record()
    with torch.npu.stream(second):
        if waits:
            second.wait_event(over)
        ops.inject(layers, IDS, staging)
    torch.npu.synchronize()
    return torch.equal(take_blocks([tuple(t.cpu() for t in layer) for layer in layers], IDS), pulled)


@both_streams
def test_inject_after_the_pull_is_right(device, backend, streams, slowed):
    assert pull_then_inject(device, streams, waits=True)


@both_streams
def test_inject_before_the_pull_ended_is_found_out(device, backend, streams, slowed):
    assert pull_then_inject(device, streams, waits=False) == (slowed == "second")


def drop_staging(device, streams) -> bool:
    """Inject on the first stream; staging is dropped at once and the second stream fills memory of the same size."""
    source, layers = make_layers("gqa", seed=7), to_device(make_layers("gqa", seed=8), device)
    first, second = streams
    rubbish = pin(torch.full_like(take_blocks(source, IDS), 0x33))
    with torch.npu.stream(second):  # its memory belongs to the second stream's pool
        staging = take_blocks(source, IDS).to(device)
    torch.npu.synchronize()
    with torch.npu.stream(first):
        event = ops.inject(layers, IDS, staging)
    del staging
    with torch.npu.stream(second):
        other = torch.empty(rubbish.shape, dtype=torch.uint8, device=device)
        other.copy_(rubbish, non_blocking=True)
    event.synchronize()
    torch.npu.synchronize()
    return torch.equal(take_blocks([tuple(t.cpu() for t in layer) for layer in layers], IDS), take_blocks(source, IDS))


@both_streams
def test_staging_lives_until_the_event(device, backend, streams, slowed):
    assert drop_staging(device, streams)


@both_streams
def test_staging_that_is_freed_too_early_is_found_out(device, defective, streams, slowed):
    defective(NO_KEEP_ALIVE)
    assert drop_staging(device, streams) == (slowed == "second")


def queue_then_inject(device, standin, streams) -> bool:
    """Everything on one stream: order is the queue's alone. The second stream only belongs to the fixture."""
    source, layers = make_layers("gqa", seed=9), to_device(make_layers("gqa", seed=10), device)
    pulled = pin(take_blocks(source, IDS))
    staging = torch.empty(pulled.shape, dtype=torch.uint8, device=device)
    ops.inject(layers, IDS, staging)  # prepared: what follows is only queued
    torch.npu.synchronize()
    standin.slow_copies_of(pulled.nbytes)
    with torch.npu.stream(streams[0]):
        staging.copy_(pulled, non_blocking=True)
        ops.inject(layers, IDS, staging)
    torch.npu.synchronize()
    return torch.equal(take_blocks([tuple(t.cpu() for t in layer) for layer in layers], IDS), pulled)


@both_streams
def test_inject_stays_behind_what_torch_queued(device, standin, backend, streams, slowed):
    assert queue_then_inject(device, standin, streams)


@both_streams
def test_a_call_that_overtakes_the_queue_is_found_out(device, standin, defective, streams, slowed):
    defective(OVERTAKE_QUEUE)
    assert not queue_then_inject(device, standin, streams)


def count_syncs(device, standin, streams) -> int:
    host, layers = make_both(device)
    staging = torch.empty(ops.compute_staging_bytes(layers, len(IDS)), dtype=torch.uint8, device=device)
    ops.extract(layers, IDS, staging).synchronize()
    with standin.counting() as counted, torch.npu.stream(streams[0]):
        poll(ops.extract(layers, IDS, staging))
        poll(ops.inject(layers, IDS, staging))
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
