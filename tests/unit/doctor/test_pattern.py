# SPDX-License-Identifier: Apache-2.0
"""What is damage: a block in the wrong place, an old one, a changed one. Rounds are not fooled by old bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_pd.doctor.peer import pattern, plane
from vllm_ascend_pd.doctor.peer.messages import PlaneAddress
from vllm_ascend_pd.secret import Secret

SEED, TENSORS, BLOCKS, SIZE = 7, 3, 4, 512


def damage(read) -> str:
    found = pattern.find_damage(SEED, TENSORS, BLOCKS, SIZE, read)
    return "" if found is None else str(found)


def source_of(block: int) -> int:
    return pattern.destinations(BLOCKS).index(block)


def test_all_blocks_at_their_places_are_no_damage():
    assert damage(lambda tensor, block: pattern.block_bytes(SEED, tensor, source_of(block), SIZE)) == ""


def test_a_copy_that_ignores_where_blocks_go_is_found():
    assert damage(lambda tensor, block: pattern.block_bytes(SEED, tensor, block, SIZE)).startswith("12 blocks")


def test_the_bytes_of_another_run_are_found():
    told = damage(lambda tensor, block: pattern.block_bytes(SEED + 1, tensor, source_of(block), SIZE))
    assert "of 512 bytes differ, from byte 0 on" in told


def test_one_changed_bit_is_found():
    def read(tensor: int, block: int) -> bytes:
        data = bytearray(pattern.block_bytes(SEED, tensor, source_of(block), SIZE))
        if (tensor, block) == (2, 0):
            data[-1] ^= 128
        return bytes(data)

    assert damage(read) == "1 blocks arrived wrong; first: tensor 2, block 3: 1 of 512 bytes differ, from byte 511 on"


def test_every_block_is_unlike_every_other():
    blocks = {pattern.block_bytes(SEED, t, b, SIZE) for t in range(TENSORS) for b in range(BLOCKS)}
    assert len(blocks) == TENSORS * BLOCKS


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_a_round_is_not_fooled_by_the_bytes_of_the_one_before(num_good: int):
    """A data plane that moves nothing from some pull on."""
    geometry = plane.Geometry.of(1 << 20)
    doctor = plane.DoctorPlane(Secret(b"a secret of two doctors"), "127.0.0.1", geometry, 5.0)
    target = doctor._target = plane.ArenaMemory(geometry.stride * geometry.num_tensors)
    pulls: list[int] = []

    def pull_blocks(key, cache, sources, targets, **_) -> None:
        pulls.append(len(pulls))
        if len(pulls) > num_good:
            return
        for tensor in range(geometry.num_tensors):
            for source, block in zip(sources, targets, strict=True):
                data = pattern.block_bytes(SEED, tensor, source, geometry.block_bytes)
                target.write(geometry.offset(tensor, block), data)

    doctor._engine = SimpleNamespace(cache_manager=SimpleNamespace(pull_blocks=pull_blocks))
    peer = PlaneAddress(
        cluster_id=1,
        host="127.0.0.1",
        port=1,
        num_blocks=geometry.num_blocks,
        block_bytes=geometry.block_bytes,
        num_tensors=geometry.num_tensors,
        seed=SEED,
    )
    seconds, problem = doctor._pull_rounds(peer)
    assert seconds > 0
    assert len(pulls) == min(num_good + 1, plane.ROUNDS)
    assert ("nothing arrived" in problem) == (num_good < plane.ROUNDS)


@pytest.mark.parametrize(
    ("num_bytes", "moved"), [(1, 256 << 10), (64 << 20, 64 << 20), ((64 << 20) + 1, (64 << 20) + (256 << 10))]
)
def test_at_least_what_was_asked_for_is_moved(num_bytes: int, moved: int):
    geometry = plane.Geometry.of(num_bytes)
    assert geometry.num_bytes == moved
    assert geometry.stride % (2 << 20) == 0
