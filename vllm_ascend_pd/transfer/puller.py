# SPDX-License-Identifier: Apache-2.0
"""One decode worker rank's pulls: renew the lease, link, pull, release, answer.

Threads named "pd-pull-N" of the worker process, off the step path; the engine's thread only puts tasks into the
queue and takes answers. Before this: `engine/decode.py` planned. After: `transfer/loads.py` ANDs the ranks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.datadist.outcomes import PULL, Action, judge
from vllm_ascend_pd.errors import PDError, PDUnreachableError
from vllm_ascend_pd.transfer.choice import WayChooser
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.links import LinkTable, SpoiltLinkError
from vllm_ascend_pd.transfer.loads import RankResult
from vllm_ascend_pd.transfer.moving import Caches, Moved, PullFailedError, move
from vllm_ascend_pd.transfer.tasks import DropPeer, PullTask
from vllm_ascend_pd.wire import LeaseRelease, LeaseRenew, LeaseVerdict, RankAddress

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 5.0
CONTROL_ATTEMPTS = 3
QUIET_TIMEOUT_S = 1.0
IDLE_BEAT_S = 0.5
WAIT_S = 0.1  # before the same again, where the data plane says that it is busy
STUCK_S = 30.0  # longer than what a pull may take after its deadline: a link, a slice, two control messages


@dataclass
class PullContext:
    """What a rank needs to pull."""

    rank: int
    num_ranks: int
    caches: Caches
    caches_hash: str  # of how this rank's caches are ordered: the other side's must be equal
    links: LinkTable
    ways: WayChooser
    clients: ClientTable
    links_changed: Callable[[], None] = lambda: None  # called by the pull threads; never raises
    bind_thread: Callable[[], None] = lambda: None  # to the device; first thing in every pull thread
    settle: Callable[[], None] = lambda: None  # blocks until what steps had launched when the task came is over
    pause: Callable[[float], object] = time.sleep


class PullWorkers:
    """A few threads that execute PullTasks; every task is answered once, also when everything goes wrong."""

    def __init__(self, context: PullContext, num_threads: int = 2) -> None:
        self._context = context
        self._tasks: queue.SimpleQueue[tuple[float, PullTask | DropPeer] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[RankResult] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._due: dict[str, float] = {}  # thread -> when it has to have come round again
        self._threads = [
            threading.Thread(target=self._run, name=f"pd-pull-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: PullTask | DropPeer) -> None:
        """Queue a task; returns at once."""
        self._tasks.put((time.monotonic(), task))

    def take_answers(self) -> list[RankResult]:
        """Answers since the last call; never blocks."""
        answers = []
        while True:
            try:
                answers.append(self._answers.get_nowait())
            except queue.Empty:
                return answers

    def find_problems(self) -> list[str]:
        """Threads that have ended without being asked to, or hang in a pull beyond its deadline."""
        if self._stopping.is_set():
            return []
        now = time.monotonic()
        dead = [f"dead: thread {thread.name}" for thread in self._threads if not thread.is_alive()]
        return dead + [f"stuck: thread {name}" for name, due in list(self._due.items()) if now > due]

    def close(self) -> None:
        """Let running pulls end, then join."""
        self._stopping.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        if self._context.ways.staged is not None:
            self._context.ways.staged.close()
        self._context.clients.close()

    def _run(self) -> None:
        self._context.bind_thread()
        while not self._stopping.is_set():
            name = threading.current_thread().name
            self._due[name] = time.monotonic() + STUCK_S
            try:
                item = self._tasks.get(timeout=IDLE_BEAT_S)
            except queue.Empty:
                continue
            if item is None:
                return
            submitted, task = item
            if isinstance(task, PullTask):
                self._due[name] = max(submitted + task.deadline_s, time.monotonic()) + STUCK_S
            if isinstance(task, DropPeer):
                self._drop(task)
                continue
            try:
                result = _execute(self._context, task, submitted)
            except SpoiltLinkError as error:
                self._wait_until_down(task, error)
                continue
            except Exception as error:  # a rank that does not answer would hold the request's blocks for ever
                logger.exception("request_id=%s: the pull failed unexpectedly", task.request_id)
                result = _failed(self._context.rank, task, f"{type(error).__name__}: {error}")
            self._context.links_changed()
            self._answers.put(result)

    def _wait_until_down(self, task: PullTask, spoilt: SpoiltLinkError) -> None:
        """In a thread of its own: the others' pulls go on. Only then are slots and blocks free again.

        There is one at most for each link: nobody links to that rank before it is down.
        """
        slots = self._context.ways.take_withheld(spoilt.cluster_id)
        result = _failed(self._context.rank, task, str(spoilt))
        name = f"pd-unlink-{spoilt.cluster_id}"

        def run() -> None:
            self._context.bind_thread()
            self._context.links.drop_spoilt(spoilt.cluster_id, spoilt.number)
            self._context.ways.put_back(slots)
            self._due.pop(name, None)
            self._context.links_changed()
            if spoilt.has_touched_blocks:
                self._answers.put(result)

        self._due[name] = time.monotonic() + STUCK_S
        threading.Thread(target=run, name=name, daemon=True).start()
        if not spoilt.has_touched_blocks:
            self._answers.put(result)

    def _drop(self, task: DropPeer) -> None:
        try:
            self._context.links.drop(task.cluster_ids)
            self._context.links_changed()
        except Exception:  # the thread has other pulls to do
            logger.exception("links of a prefill engine that has ended were not dropped")


def _failed(rank: int, task: PullTask, reason: str) -> RankResult:
    return RankResult(task.request_id, task.transfer_id, rank, False, reason)


def _execute(context: PullContext, task: PullTask, submitted: float) -> RankResult:
    started, deadline = time.monotonic(), submitted + task.deadline_s
    unlike = [r for r in task.ranks if r.tp_rank == context.rank and r.caches != context.caches_hash]
    if unlike:  # the handshake has compared what is behind these; a pull would pair other layers
        return _failed(context.rank, task, f"layout: caches {unlike[0].caches} there, {context.caches_hash} here")
    if context.clients.was_silent_since(task.control_host, task.control_port, submitted):
        return _failed(context.rank, task, "unreachable: its prefill engine did not answer another pull meanwhile")
    client = context.clients.get(task.control_host, task.control_port)
    ident = {"lease_id": task.lease_id, "transfer_id": task.transfer_id, "reader": task.reader}
    try:
        if started > deadline:  # it stood in the queue for so long
            raise PullFailedError("deadline: it had passed before the pull began")
        verdict = _ask(client, LeaseRenew(**ident, rank=context.rank, num_ranks=context.num_ranks))
        if not verdict.held:
            return _failed(context.rank, task, f"lease_{verdict.state}")
        renewed = time.monotonic()
        context.settle()  # a step may still write to blocks that were another request's when it was launched
        moved = _pull(context, task, min(deadline, renewed + verdict.remaining_ms / 1000))
        pulled = time.monotonic()
        # The lease has to have been ours until after the last byte; only its owner can say so.
        verdict = _ask(client, LeaseRelease(**ident, rank=context.rank, num_ranks=context.num_ranks))
    except PDUnreachableError as error:  # asking once more would only hold up other pulls
        context.clients.note_silence(task.control_host, task.control_port)
        return _failed(context.rank, task, f"unreachable: {error}")
    except SpoiltLinkError:
        _release_quietly(client, ident, context)
        raise
    except PDError as error:
        _release_quietly(client, ident, context)
        return _failed(context.rank, task, str(error))
    ended = time.monotonic()
    result = RankResult(
        task.request_id,
        task.transfer_id,
        context.rank,
        True,
        "",
        moved.num_bytes,
        moved.num_pieces,
        moved.num_calls,
        moved.staged,
        {
            "renew": renewed - started,
            "link": moved.link_s,
            "extract": moved.extract_s,
            "pull": moved.pull_s,
            "inject": moved.inject_s,
            "release": ended - pulled,
        },
    )
    return result if verdict.held else replace(result, ok=False, reason=f"lease_{verdict.state}")


def _ask(client: ControlClient, message: LeaseRenew | LeaseRelease) -> LeaseVerdict:
    answer = client.request(message, CONTROL_TIMEOUT_S, CONTROL_ATTEMPTS)
    if not isinstance(answer, LeaseVerdict):
        raise PullFailedError(f"lease: {getattr(answer, 'message', answer)}")
    return answer


def _release_quietly(client: ControlClient, ident: dict[str, str], context: PullContext) -> None:
    """After a failed pull P need not wait for the lease to expire; nobody reads these blocks any more."""
    try:
        client.request(LeaseRelease(**ident, rank=context.rank, num_ranks=context.num_ranks), QUIET_TIMEOUT_S, 1)
    except PDError as error:
        logger.debug("release after a failed pull: %s", error)


def _pull(context: PullContext, task: PullTask, deadline: float) -> Moved:
    """What was moved. One relink when the link was spoilt by somebody else.

    Raises:
        SpoiltLinkError: the link is undefined and did not go down at once: the transfer may still be writing, and an
            answer would free the blocks.
    """
    source = _source_rank(task.ranks, context.rank)
    started = time.monotonic()
    number = context.links.ensure(source, deadline)
    link_s = time.monotonic() - started
    has_relinked = False
    while True:
        try:
            moved = move(context.caches, context.ways, task.pulls, source.cluster_id, deadline)
        except context.caches.module.LLMException as error:
            outcome = judge(PULL, error.status_code)
            if outcome.spoils:
                if not context.links.take_down(source.cluster_id, number):
                    reason = f"pull: {error}"
                    raise SpoiltLinkError(reason, source.cluster_id, number, has_touched_blocks=True) from error
                context.ways.put_back(context.ways.take_withheld(source.cluster_id))
            if outcome.action is Action.RELINK and not has_relinked:
                has_relinked = True
                number = context.links.ensure(source, deadline)
            elif outcome.action is Action.WAIT and time.monotonic() + WAIT_S < deadline:
                context.pause(WAIT_S)
            else:
                raise PullFailedError(f"pull: {error}") from error
        else:
            moved.link_s = link_s
            return moved


def _source_rank(ranks: Sequence[RankAddress], rank: int) -> RankAddress:
    for address in ranks:
        if address.tp_rank == rank:
            return address
    raise PullFailedError(f"the prefill side has no TP rank {rank} (it has {[r.tp_rank for r in ranks]})")
