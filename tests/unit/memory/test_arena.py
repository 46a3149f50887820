# SPDX-License-Identifier: Apache-2.0
"""The shared memory arena: alignment, seals, population, lifetime, errors."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd.memory import arena as arena_module
from vllm_ascend_pd.memory.arena import Arena, ArenaMemoryError, find_arena
from vllm_ascend_pd.memory.available import AvailableMemory, read_available_memory
from vllm_ascend_pd.memory.mapping import ALIGNMENT, SharedMapping

MIB = 1 << 20


@pytest.mark.parametrize("num_bytes", [1, 4096, 2 * MIB, 5 * MIB + 3])
def test_base_is_aligned_and_memory_is_zero(num_bytes):
    arena = Arena.create(num_bytes, "test")
    assert arena.address % ALIGNMENT == 0
    assert arena.num_bytes == num_bytes == len(arena.buffer)
    assert bytes(arena.buffer) == bytes(num_bytes)


def test_all_pages_are_populated_at_once():
    arena = Arena.create(8 * MIB, "test")
    assert os.fstat(arena.fd).st_blocks * 512 == 8 * MIB
    assert "of 8 MiB" in arena.huge_pages


def test_huge_page_fallback_says_why():
    code = (
        "import ctypes, logging, os\nlogging.basicConfig(level='INFO')\n"
        "ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: this process gets no huge pages\n"
        "from vllm_ascend_pd.memory.arena import Arena\n"
        "arena = Arena.create(4 << 20, 'fallback')\n"
        "print(arena.huge_pages)\n"
        "print(os.fstat(arena.fd).st_blocks * 512 >> 20, bytes(arena.buffer) == bytes(4 << 20))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 of 4 MiB (MADV_COLLAPSE: Invalid argument)\n4 True\n"
    assert "MADV_COLLAPSE: Invalid argument" in done.stderr


def test_small_pages_are_populated_where_huge_ones_are_not_wanted():
    arena = Arena.create(4 * MIB, "small pages", want_huge=False)
    assert arena.huge_pages == "not wanted"
    assert os.fstat(arena.fd).st_blocks * 512 == 4 * MIB


def test_larger_than_one_step_is_populated_whole():
    arena = Arena.create(130 * MIB, "several chunks")
    assert os.fstat(arena.fd).st_blocks * 512 == 130 * MIB
    assert "of 130 MiB" in arena.huge_pages


def test_memory_that_the_kernel_refuses_is_the_same_error(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("fallocate of a memory file: No space left on device")

    monkeypatch.setattr(arena_module.MemoryFile, "populate", refuse)
    with pytest.raises(ArenaMemoryError, match="KV arena 'refused': 4194304 bytes"):
        Arena.create(4 * MIB, "refused")


def test_numa_node_is_named(monkeypatch):
    monkeypatch.setattr(arena_module, "find_numa_node", lambda: 0)
    assert Arena.create(2 * MIB, "on a node").numa == "node 0"


def test_refused_numa_node_says_why(monkeypatch):
    monkeypatch.setattr(arena_module, "find_numa_node", lambda: 1000)
    assert Arena.create(2 * MIB, "nowhere").numa == "any node (mbind: Invalid argument)"


@pytest.mark.parametrize("size", [0, 4 * MIB, 4096 * MIB])
def test_size_is_sealed(size):
    arena = Arena.create(8 * MIB, "sealed")
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)


def test_nobody_maps_it_writable_again():
    arena = Arena.create(2 * MIB, "sealed")
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 2 * MIB, mmap.MAP_SHARED, mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(arena.fd, b"x", 0)


def test_read_only_mapping_sees_what_the_owner_writes():
    arena = Arena.create(2 * MIB, "shared")
    reader = SharedMapping(arena.fd, arena.num_bytes, writable=False)
    arena.buffer[100:105] = b"hello"
    import ctypes

    assert ctypes.string_at(reader.address + 100, 5) == b"hello"
    assert reader.address % ALIGNMENT == 0


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_size_must_be_positive(num_bytes):
    with pytest.raises(ValueError, match="num_bytes must be positive"):
        Arena.create(num_bytes, "none")


def test_short_machine_is_an_error_that_names_both_sizes():
    wanted = read_available_memory().num_bytes + 1024 * MIB
    with pytest.raises(ArenaMemoryError) as failure:
        Arena.create(wanted, "too big")
    text = str(failure.value)
    assert str(wanted) in text
    assert "available" in text
    assert "MemAvailable" in text
    assert "too big" in text
    assert failure.value.wanted_bytes == wanted


def test_memory_that_goes_away_while_populating_is_the_same_error(monkeypatch):
    plenty, little = AvailableMemory(1 << 40), AvailableMemory(1 << 40, 10 * MIB, 512 * MIB)
    answers = [plenty, plenty, little]
    monkeypatch.setattr(arena_module, "read_available_memory", lambda: answers.pop(0))
    with pytest.raises(ArenaMemoryError, match="cgroup limit is 512 MiB"):
        Arena.create(128 * MIB, "shrinking")


def test_find_arena_wants_the_whole_range():
    arena = Arena.create(4 * MIB, "found")
    assert find_arena(arena.address, 4 * MIB) == (arena, 0)
    assert find_arena(arena.address + 5, 10) == (arena, 5)
    assert find_arena(arena.address + 5, 4 * MIB) is None
    assert find_arena(arena.address - 1, 2) is None


def test_closed_when_the_last_user_goes():
    arena = Arena.create(2 * MIB, "short-lived")
    address, fd = arena.address, arena.fd
    view = arena.buffer
    del arena
    gc.collect()
    assert find_arena(address, 1) is not None  # the view keeps it
    del view
    gc.collect()
    assert find_arena(address, 1) is None
    with pytest.raises(OSError, match="Bad file"):
        fcntl.fcntl(fd, fcntl.F_GETFD)


def test_tensor_keeps_the_arena():
    torch = pytest.importorskip("torch")
    tensor = Arena.create(2 * MIB, "tensor").as_tensor()
    gc.collect()
    found = find_arena(tensor.data_ptr(), 2 * MIB)
    assert found is not None
    assert tensor.dtype == torch.int8
    tensor.fill_(3)
    assert bytes(found[0].buffer[:4]) == b"\x03" * 4


def test_memory_is_free_after_kill_9():
    code = (
        "import sys\nfrom vllm_ascend_pd.memory.arena import Arena\n"
        "arena = Arena.create(256 << 20, 'killed')\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    held = _shared_bytes()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert held - _shared_bytes() > 100 * MIB


_OWNER = (
    "import sys\nfrom vllm_ascend_pd.memory.arena import Arena\n"
    "arena = Arena.create(256 << 20, 'shared')\narena.buffer[:5] = b'hello'\n"
    "print(arena.fd, flush=True)\nsys.stdin.read()\n"
)
_READER = (
    "import ctypes, os, sys\nfrom vllm_ascend_pd.memory.mapping import SharedMapping\n"
    "fd = os.open(sys.argv[1], os.O_RDONLY)\nmapping = SharedMapping(fd, 256 << 20, writable=False)\nos.close(fd)\n"
    "print('mapped', flush=True)\nsys.stdin.readline()\n"
    "print(ctypes.string_at(mapping.address, 5).decode(), flush=True)\nsys.stdin.read()\n"
)


def _start(code: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    return child, child.stdout.readline().decode().strip()


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def test_reader_keeps_the_memory_of_a_killed_owner_until_it_is_killed_too():
    owner, fd = _start(_OWNER)
    reader, said = _start(_READER, f"/proc/{owner.pid}/fd/{fd}")
    assert said == "mapped"
    held = _shared_bytes()
    _kill(owner)
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(b"\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == b"hello\n"
    assert held - _shared_bytes() < 100 * MIB
    _kill(reader)
    assert held - _shared_bytes() > 100 * MIB


def test_owner_goes_on_after_its_reader_was_killed():
    owner, fd = _start(_OWNER)
    reader, _ = _start(_READER, f"/proc/{owner.pid}/fd/{fd}")
    held = _shared_bytes()
    _kill(reader)
    assert held - _shared_bytes() < 100 * MIB
    assert owner.poll() is None
    _kill(owner)
    assert held - _shared_bytes() > 100 * MIB


@pytest.mark.parametrize("num_bytes", [0, -5])
def test_mapping_nothing_is_an_error(num_bytes):
    with pytest.raises(OSError, match=f"cannot map {num_bytes} bytes"):
        SharedMapping(0, num_bytes, writable=False)


def test_mapping_names_what_the_system_said():
    with pytest.raises(OSError, match="cannot map") as failure:
        SharedMapping(10_000, 2 * MIB, writable=False)
    assert failure.value.errno == errno.EBADF


def test_mapping_is_closed_once():
    arena = Arena.create(2 * MIB, "closed")
    mapping = SharedMapping(arena.fd, 2 * MIB, writable=False)
    assert not mapping.is_closed
    mapping.close()
    mapping.close()
    assert mapping.is_closed
    assert mapping.num_bytes == 2 * MIB


def _shared_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, AvailableMemory(8 << 30)),
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, AvailableMemory(8 << 30)),
        (
            "0::/a/b\n",
            {"a/memory.max": str(100 * MIB), "a/memory.current": str(60 * MIB), "a/b/memory.max": "max"},
            AvailableMemory(8 << 30, 40 * MIB, 100 * MIB),
        ),
        (
            "0::/gone\n",
            {
                "memory.max": str(100 * MIB),
                "memory.current": str(60 * MIB),
                "memory.stat": f"inactive_file {10 * MIB}",
            },
            AvailableMemory(8 << 30, 50 * MIB, 100 * MIB),
        ),
        (
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": str(64 * MIB),
                "memory/x/memory.usage_in_bytes": str(70 * MIB),
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/memory.usage_in_bytes": "7",
            },
            AvailableMemory(8 << 30, 0, 64 * MIB),
        ),
    ],
)
def test_available_memory_honours_every_level_of_cgroup(tmp_path, cgroup, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert read_available_memory(tmp_path) == expected
