# SPDX-License-Identifier: Apache-2.0
"""One worker half in a process of its own, with the caches of a small model; driven by JSON lines (`Side`).

Caches are tuples per layer as vllm-ascend makes them: every tensor its own allocation, 2 MiB-aligned by slicing. Also
run over the NPU stand-in (`tests/npu`), with the tensors on the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from vllm_ascend_pd.config import PDConfig, PDRole
from vllm_ascend_pd.control.server import ControlServer
from vllm_ascend_pd.engine.worker import WorkerHalf
from vllm_ascend_pd.plan.blocks import GroupPull
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.transfer.tasks import PullTask
from vllm_ascend_pd.wire import LeaseRelease, LeaseRenew, LeaseVerdict, RankAddress

SECRET = Secret(b"s" * 32)
MIB2 = 2 << 20
NUM_BLOCKS, UNTOUCHED = 24, 0xEE
ANSWER = "answer "  # before every line that is for the parent
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
HELD = LeaseVerdict(held=True, state="held", remaining_ms=30000)
# Per kind the parts of a layer, without the extent of the blocks; the last one has kernel blocks of half the size.
PARTS = {
    "gqa": [((16, 4, 32), 1), ((16, 4, 32), 1)],
    "mla": [((16, 1, 512), 1), ((16, 1, 64), 1)],
    "sparse": [((16, 1, 512), 1), ((16, 1, 64), 1), ((16, 1, 128), 2)],
}


class FullAttentionSpec:
    block_size, num_kv_heads, head_size, dtype, page_size_bytes = 16, 4, 32, torch.bfloat16, 1 << 14


class AscendMLAAttentionSpec(FullAttentionSpec):
    num_kv_heads, head_size = 1, 576


def make_config(kind: str) -> Any:
    """A KVCacheConfig."""
    spec = FullAttentionSpec() if kind == "gqa" else AscendMLAAttentionSpec()
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec)
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group])


def pattern(layer: int, part: int, block: int, num_bytes: int) -> torch.Tensor:
    """What a prefill side's block holds."""
    generator = torch.Generator().manual_seed(layer * 10_000 + part * 1_000 + block)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def allocate(num_bytes: int, device: str) -> torch.Tensor:
    """As vllm-ascend's runner does when there is a KV transfer config."""
    raw = torch.empty(num_bytes + MIB2, dtype=torch.int8, device=device)
    return raw[-raw.data_ptr() % MIB2 :][:num_bytes]


def make_caches(kind: str, order: list[int], device: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """By layer its parts. `order` is that in which the layers are allocated; the dict is in that order too."""
    shapes = [((NUM_BLOCKS * scale, *shape), shape) for shape, scale in PARTS[kind]]
    kept, made = [], {}
    for layer in order:
        parts = []
        for whole, _ in shapes:
            num_bytes = 2 * torch.Size(whole).numel()
            kept.append(torch.empty(64 << 10, device=device))  # something else comes between
            parts.append(allocate(num_bytes, device).view(torch.bfloat16).view(whole))
        made[LAYERS[layer]] = tuple(parts)
    return made


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """`[NUM_BLOCKS, bytes]`, whatever the kernels' block size."""
    return tensor.view(NUM_BLOCKS, -1).view(torch.uint8)


class Half:
    """In the child."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.is_prefill = options["role"] == "prefill"
        device = options.get("device", "cpu")
        if device != "cpu":
            import torch_npu  # noqa: F401 - registers the device

            torch.npu.set_device(device)
        self.caches = make_caches(options["kind"], options["order"], device)
        self.fill()
        config = PDConfig(
            role=PDRole(options["role"]), engine_id=options["role"], epoch="e", runtime_dir=options["folder"],
            transfer=options["transfer"], host_transport=options.get("transport", "auto"),
        )  # fmt: skip
        self.worker = WorkerHalf(config, SECRET, make_config(options["kind"]), 0, 1, takes_host_plane=True)
        self.worker.register(self.caches)
        self.control: ControlServer | None = None
        if self.is_prefill:
            held = {kind: lambda _, reply: reply.send(HELD) for kind in (LeaseRenew, LeaseRelease)}
            self.control = ControlServer(f"{options['folder']}/core.sock", "tcp://127.0.0.1:*", SECRET, held)
            self.control.start()

    def describe(self) -> dict[str, Any]:
        address = msgspec.to_builtins(self.worker.address)
        port = self.control.peer_port if self.control is not None else 0
        return {"address": address, "port": port, "record": self.worker.caches_record}

    def pull(self, source: dict[str, Any], src: list[int], dst: list[int]) -> dict[str, Any]:
        rank = msgspec.convert(source["address"], RankAddress)
        pulls = (GroupPull(0, tuple(src), tuple(dst)),)
        ident = ("r", f"t{time.monotonic()}", "lease", "127.0.0.1", source["port"])
        task = PullTask(*ident, (rank,), pulls, deadline_s=20.0, reader="e")
        self.worker.submit(task)
        until = time.monotonic() + 30
        while not (answers := self.worker.take_results()):
            assert time.monotonic() < until, "no answer"
            time.sleep(0.002)
        return {"ok": answers[0].ok, "reason": answers[0].reason, "calls": answers[0].num_calls,
                "staged": answers[0].staged}  # fmt: skip

    def take_links(self) -> list[dict[str, Any]]:
        """As of the last pull."""
        (links,) = self.worker.take_links().values()
        return links

    def fill(self) -> None:
        """A prefill side's blocks hold their pattern, a decode side's the same byte everywhere."""
        for layer, name in enumerate(LAYERS):
            for part, tensor in enumerate(self.caches[name]):
                size = blocks_of(tensor).shape[1]
                rows = [pattern(layer, part, block, size) for block in range(NUM_BLOCKS)]
                filled = torch.stack(rows) if self.is_prefill else torch.full((NUM_BLOCKS, size), UNTOUCHED).byte()
                blocks_of(tensor).copy_(filled)

    def compare(self, src: list[int], dst: list[int]) -> list[str]:
        """Blocks that do not hold what they must after these were pulled."""
        wrong, came = [], dict(zip(dst, src, strict=True))
        for layer, name in enumerate(LAYERS):
            for part, tensor in enumerate(self.caches[name]):
                rows = blocks_of(tensor.cpu())
                for block in range(NUM_BLOCKS):
                    wanted = torch.full_like(rows[block], UNTOUCHED)
                    if block in came:
                        wanted = pattern(layer, part, came[block], rows.shape[1])
                    if not torch.equal(rows[block], wanted):
                        wrong.append(f"layer {layer} part {part} block {block}")
        return wrong

    def read_counters(self) -> dict[str, int]:
        """Of the NPU stand-in."""
        from tests.npu.standin import Standin

        return Standin().read()

    def close(self) -> None:
        self.worker.close()
        if self.control is not None:
            self.control.close()


class Side:
    """In the parent: calls a method of the child's `Half` and returns its answer."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", __name__, json.dumps({"folder": str(folder), **options})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told = self._read()

    def call(self, name: str, *values: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, values]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # torch_npu prints there too
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(f"the child has ended: {self._process.wait()}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.communicate("", timeout=30)


def main() -> None:
    half = Half(json.loads(sys.argv[1]))
    print(ANSWER + json.dumps(half.describe()), flush=True)
    for line in sys.stdin:
        name, values = json.loads(line)
        print(ANSWER + json.dumps(getattr(half, name)(*values)), flush=True)
    half.close()


if __name__ == "__main__":
    main()
