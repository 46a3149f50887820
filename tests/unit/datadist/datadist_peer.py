# SPDX-License-Identifier: Apache-2.0
"""A peer in a process of its own, driven by JSON lines; run as a script by `Peer`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tests.contract import implementation
from vllm_ascend_pd.datadist import OPTION_SECRET, OPTION_TRANSPORT, link_transport
from vllm_ascend_pd.memory import Arena

MIB = 1 << 20
SECRET = "ab" * 32
NUM_BLOCKS, BLOCK_BYTES, NUM_TENSORS = 64, 32 << 10, 4
TENSOR_BYTES = NUM_BLOCKS * BLOCK_BYTES  # 2 MiB


def pattern(cluster_id: int, tensor: int, block: int) -> bytes:
    """The bytes of one block; unlike for every (cluster, tensor, block), and position dependent inside."""
    seed = (cluster_id * 1_000_003 + tensor * 7919 + block * 104_729) & 0xFFFFFFFF
    head = seed.to_bytes(4, "little") + bytes([(seed * k) & 0xFF for k in range(1, 253)])
    return head * (BLOCK_BYTES // 256)


def make_options(cluster: dict[str, Any]) -> dict[str, str]:
    config = implementation.LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = cluster.get("timeout_ms", 5000)
    if cluster.get("listen", True):
        config.listen_ip_info = cluster.get("address", "127.0.0.1:0")
    options = {OPTION_TRANSPORT: cluster.get("transport", "auto")}
    if cluster.get("secret", SECRET):
        options[OPTION_SECRET] = cluster.get("secret", SECRET)
    options.update(cluster.get("options", {}))
    config.ge_options = options
    return config.generate_options()


class Node:
    """One LLMDataDist with one blocks cache (model_id 0) full of its pattern, in this process."""

    def __init__(self, **cluster: Any) -> None:
        self.module = implementation.module
        self.cluster_id = cluster["cluster_id"]
        self.datadist: Any = self.module.LLMDataDist(self.module.LLMRole.MIX, self.cluster_id)
        self.datadist.init(make_options(cluster))
        self.memory: Any = None
        if cluster.get("arena", True):
            self.memory = Arena.create(NUM_TENSORS * TENSOR_BYTES, "test")
            base = self.memory.address
        else:
            self.memory = (ctypes.c_char * (NUM_TENSORS * TENSOR_BYTES + 2 * MIB))()
            base = -(-ctypes.addressof(self.memory) // (2 * MIB)) * (2 * MIB)
        self.addresses = [base + index * TENSOR_BYTES for index in range(NUM_TENSORS)]
        self.fill()
        self.desc = self.make_desc()
        key = self.module.BlocksCacheKey(self.cluster_id, 0)
        self.manager = self.datadist.cache_manager
        self.cache = self.manager.register_blocks_cache(self.desc, self.addresses, key)
        if cluster.get("extra_caches"):
            self.register_more()

    def register_more(self) -> None:
        """Cache 2: blocks of model_id 1, not accessible; cache 3: four slots, 1 is request 11 and 2 request 0."""
        key = self.module.BlocksCacheKey(self.cluster_id, 1)
        self.manager.register_blocks_cache(self.desc, self.addresses, key, False)
        desc = self.module.CacheDesc(NUM_TENSORS, [4, TENSOR_BYTES // 4], self.module.DataType.DT_INT8)
        keys = [self.module.CacheKey(self.cluster_id, number) for number in (implementation.INVALID_ID, 11, 0)]
        self.manager.register_cache(desc, self.addresses, keys)

    def make_desc(self, num_tensors: int = NUM_TENSORS, num_blocks: int = NUM_BLOCKS) -> Any:
        shape = [num_blocks, BLOCK_BYTES]
        return self.module.CacheDesc(num_tensors, shape, self.module.DataType.DT_INT8)

    def fill(self) -> None:
        for tensor, address in enumerate(self.addresses):
            data = b"".join(pattern(self.cluster_id, tensor, block) for block in range(NUM_BLOCKS))
            ctypes.memmove(address, data, TENSOR_BYTES)

    @property
    def port(self) -> int | None:
        port: int | None = implementation.listening_port(self.datadist)
        return port

    def block(self, tensor: int, block: int) -> bytes:
        return ctypes.string_at(self.addresses[tensor] + block * BLOCK_BYTES, BLOCK_BYTES)

    def info(self, cluster_id: int, port: int) -> Any:
        info = self.module.LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", port)
        return info

    def link(self, cluster_id: int, port: int, timeout: int = 20_000) -> Any:
        return self.datadist.link_clusters([self.info(cluster_id, port)], timeout)[0]

    def unlink(self, cluster_id: int, port: int = 0, force: bool = True) -> Any:
        return self.datadist.unlink_clusters([self.info(cluster_id, port)], force=force)[0]

    def pull(self, cluster_id: int, src: list[int], dst: list[int], **kwargs: Any) -> None:
        key = self.module.BlocksCacheKey(cluster_id, kwargs.pop("model_id", 0))
        self.manager.pull_blocks(key, self.cache, src, dst, **kwargs)

    def transport(self, cluster_id: int) -> str:
        return link_transport(self.datadist, cluster_id)


def pull_status(node: Node, *args: Any, **kwargs: Any) -> Any:
    """How a pull ended."""
    try:
        node.pull(*args, **kwargs)
    except node.module.LLMException as error:
        return error.status_code
    return node.module.LLMStatusCode.LLM_SUCCESS


def holds(node: Node, cluster_id: int, src: int, dst: int) -> bool:
    """Whether block `dst` holds that cluster's block `src` in every tensor."""
    return all(node.block(tensor, dst) == pattern(cluster_id, tensor, src) for tensor in range(NUM_TENSORS))


class Peer:
    """A Node in a child process."""

    _spares: ClassVar[list[subprocess.Popen[str]]] = []  # started ahead: importing takes most of the time

    def __init__(self, **cluster: Any) -> None:
        while len(self._spares) < 3:
            self._spares.append(self._spawn())
        self.process = self._spares.pop(0)
        self.cluster_id = cluster["cluster_id"]
        self.port = self.call(cluster)

    @staticmethod
    def _spawn() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.unit.datadist.datadist_peer"]
        root = Path(__file__).parents[3]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    @classmethod
    def kill_spares(cls) -> None:
        while cls._spares:
            process = cls._spares.pop()
            process.kill()
            process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended")
        return json.loads(line)

    def start(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def call(self, *words: Any) -> Any:
        self.start(*words)
        return self._answer()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def _check(node: Node, cluster_id: int, src: int, dst: int) -> list[bool]:
    """Does our block hold that cluster's pattern?"""
    return [node.block(tensor, dst) == pattern(cluster_id, tensor, src) for tensor in range(NUM_TENSORS)]


def _register(node: Node, *key: int) -> None:
    node.manager.register_blocks_cache(node.desc, node.addresses, node.module.BlocksCacheKey(node.cluster_id, *key))


def _comm(node: Node, name: str, members: list[list[int]], table: str) -> int:
    """Two-sided link; `members` are (cluster, rank)."""
    return int(node.datadist.link(name, {cluster: rank for cluster, rank in members}, table))


VERBS: dict[str, Callable[..., Any]] = {
    "link": lambda node, *args: str(node.link(*args)),
    "unlink": lambda node, *args: str(node.unlink(*args)),
    "pull": Node.pull,
    "pull_model": lambda node, cluster, model, *args: node.pull(cluster, *args, model_id=model),
    "check": _check,
    "register": _register,
    "unregister": lambda node, *args: node.manager.unregister_cache(*args),
    "finalize": lambda node: node.datadist.finalize(),
    "transport": Node.transport,
    "comm": _comm,
    "comm_status": lambda node, *args: node.datadist.query_register_mem_status(*args).name,
    "comm_unlink": lambda node, *args: node.datadist.unlink(*args),
}


def run_peer() -> None:
    first = sys.stdin.readline()
    if not first:
        return
    node = Node(**json.loads(first)[0])
    print(json.dumps(node.port), flush=True)
    for line in sys.stdin:
        verb, *args = json.loads(line)
        try:
            result = VERBS[verb](node, *args)
        except node.module.LLMException as error:
            result = error.status_code.name
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run_peer()
