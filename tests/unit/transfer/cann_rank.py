# SPDX-License-Identifier: Apache-2.0
"""One rank's data plane over the stand-in of CANN's package, as a worker sets it up; as a process of its own the
prefill side, driven by lines.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
if str(ROOT / "tests/standin") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests/standin"))

from vllm_ascend_pd import datadist  # noqa: E402
from vllm_ascend_pd.datadist.api import Way  # noqa: E402
from vllm_ascend_pd.plan.blocks import GroupPull  # noqa: E402
from vllm_ascend_pd.plan.layout import Region, build_layout  # noqa: E402
from vllm_ascend_pd.secret import Secret  # noqa: E402
from vllm_ascend_pd.transfer.choice import WayChooser  # noqa: E402
from vllm_ascend_pd.transfer.clients import ClientTable  # noqa: E402
from vllm_ascend_pd.transfer.linking import Asker, make_linker  # noqa: E402
from vllm_ascend_pd.transfer.links import LinkTable  # noqa: E402
from vllm_ascend_pd.transfer.linkserver import LinkServer  # noqa: E402
from vllm_ascend_pd.transfer.moving import Caches, move  # noqa: E402
from vllm_ascend_pd.wire import DeviceAddress, RankAddress  # noqa: E402

HOST = "127.0.0.1"
SECRET = Secret(b"s" * 32)
NUM_BLOCKS, BLOCK_BYTES, NUM_LAYERS = 64, 32 << 10, 3
LAYERS = [f"l{i}" for i in range(NUM_LAYERS)]


def block_of(cluster_id: int, layer: int, block: int) -> bytes:
    """The bytes of one block, unlike any other's."""
    return (cluster_id * 1_000_003 + layer * 7919 + block * 104_729).to_bytes(16, "little") * (BLOCK_BYTES // 16)


def device(physical_id: int) -> DeviceAddress:
    """Of an A2 host. The server's name is where the stand-in's ranks meet."""
    return DeviceAddress(
        server_id=HOST, logical_id=physical_id, physical_id=physical_id, device_ip=f"10.0.0.{physical_id}"
    )


class Rank:
    """Memory, engine, registered cache; on the prefill side a link server, on the decode side links."""

    def __init__(self, way: Way, cluster_id: int, physical_id: int, is_prefill: bool, folder: str) -> None:
        self.module = datadist.load("cann")
        assert way in self.module.ways
        self.way = way
        self.cluster_id = cluster_id
        self.device = device(physical_id)
        role = self.module.LLMRole.PROMPT if is_prefill else self.module.LLMRole.DECODER
        self.engine: Any = self.module.LLMDataDist(role, cluster_id)
        settings = datadist.DataPlaneSettings(
            is_prefill=is_prefill, host=HOST, way=way, sync_timeout_ms=1500, device_index=physical_id
        )
        self.port = datadist.start(self.module, self.engine, settings)
        self._memory = (ctypes.c_char * (NUM_LAYERS * NUM_BLOCKS * BLOCK_BYTES + (2 << 20)))()
        base = -(-ctypes.addressof(self._memory) // (2 << 20)) * (2 << 20)
        self.addresses = [base + layer * NUM_BLOCKS * BLOCK_BYTES for layer in range(NUM_LAYERS)]
        self.cache = self.engine.cache_manager.register_blocks_cache(
            self.module.CacheDesc(NUM_LAYERS, [NUM_BLOCKS, BLOCK_BYTES], self.module.DataType.DT_UINT8),
            self.addresses,
            self.module.BlocksCacheKey(cluster_id, 0),
            remote_accessible=True,
        )
        self.server: LinkServer | None = None
        if is_prefill:
            for layer, address in enumerate(self.addresses):
                for block in range(NUM_BLOCKS):
                    ctypes.memmove(address + block * BLOCK_BYTES, block_of(cluster_id, layer, block), BLOCK_BYTES)
            path = f"{folder}/link{os.getpid()}.sock"
            self.server = datadist.bind_first(
                lambda port: LinkServer(self.engine, self.module, way, self.device, SECRET, (path, HOST, port)),
                HOST,
                offset=50 + physical_id,
            )
        else:
            self._make_links()

    def _make_links(self) -> None:
        self.clients = ClientTable(SECRET)
        asker = Asker(self.clients, self.way, self.cluster_id, self.device)
        self.ways = WayChooser("straight", None, self.clients, self.module.LLMException)
        linker = make_linker(self.engine, self.module, HOST, asker)
        self.links = LinkTable(self.engine, self.module, HOST, self.ways, linker)
        regions = {
            name: (Region(address, NUM_BLOCKS, BLOCK_BYTES),)
            for name, address in zip(LAYERS, self.addresses, strict=True)
        }
        layout = build_layout(regions, [LAYERS])
        self.caches = Caches(layout, [LAYERS], [self.cache], self.engine.cache_manager, self.module)

    @property
    def address(self) -> RankAddress:
        assert self.server is not None
        return RankAddress(
            tp_rank=0,
            cluster_id=self.cluster_id,
            host=HOST,
            port=self.port,
            device=self.device,
            link_port=self.server.port,
        )

    def pull(self, peer: RankAddress, src: tuple[int, ...], dst: tuple[int, ...], timeout_s: float = 20.0) -> int:
        """As a pull thread does: link, move. Which link it was."""
        deadline = time.monotonic() + timeout_s
        number = self.links.ensure(peer, deadline)
        move(self.caches, self.ways, [GroupPull(0, src, dst)], peer.cluster_id, deadline)
        return number

    def holds(self, cluster_id: int, src: int, dst: int) -> bool:
        """Whether block `dst` is that rank's block `src` in every layer."""
        return all(
            ctypes.string_at(address + dst * BLOCK_BYTES, BLOCK_BYTES) == block_of(cluster_id, layer, src)
            for layer, address in enumerate(self.addresses)
        )

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        else:
            self.clients.close()
        self.engine.finalize()


class PrefillProcess:
    """A prefill Rank in a child process."""

    def __init__(self, way: Way, cluster_id: int, physical_id: int, folder: Path) -> None:
        words = [sys.executable, "-m", "tests.unit.transfer.cann_rank", way.value, str(cluster_id), str(physical_id)]
        self.process = subprocess.Popen(
            [*words, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        answer = self._answer()
        self.address = RankAddress(tp_rank=0, device=device(physical_id), cluster_id=cluster_id, host=HOST, **answer)

    def ask(self, verb: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(verb + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the prefill process has ended"
        return json.loads(line)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    way, cluster_id, physical_id, folder = sys.argv[1:]
    rank = Rank(Way(way), int(cluster_id), int(physical_id), True, folder)
    assert rank.server is not None
    print(json.dumps({"port": rank.port, "link_port": rank.server.port}), flush=True)
    for line in sys.stdin:
        if line.strip() == "links":
            print(json.dumps(rank.server.num_links), flush=True)
    rank.close()


if __name__ == "__main__":
    main()
