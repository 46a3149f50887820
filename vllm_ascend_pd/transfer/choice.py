# SPDX-License-Identifier: Apache-2.0
"""Straight or staged, by link: `--pd-transfer`, what the prefill rank can do, and the link's measured cost model.

Pull threads of one decode worker rank; a link is measured under its lock in `LinkTable`, before anybody uses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.datadist.outcomes import PULL, judge
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.transfer.clients import ClientTable
from vllm_ascend_pd.transfer.staging.copier import StagingError
from vllm_ascend_pd.transfer.staging.cost import LinkModel
from vllm_ascend_pd.transfer.staging.puller import StagedPuller
from vllm_ascend_pd.wire import RankAddress

logger = logging.getLogger(__name__)


@dataclass
class _Link:
    client: ControlClient | None  # the prefill rank's staging; None: it has none
    model: LinkModel | None = None
    why: str = ""  # there is no model
    num_straight: int = 0
    num_staged: int = 0


class WayChooser:
    """What is known of each link. `staged` is None where this rank has no staging buffer (`--pd-transfer straight`)."""

    def __init__(
        self, mode: str, staged: StagedPuller | None, clients: ClientTable, exceptions: type[Exception]
    ) -> None:
        self.mode = mode
        self.staged = staged
        self._clients = clients
        self._exceptions = exceptions
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}

    def prepare(self, peer: RankAddress) -> bool:
        """A link to this rank has just been made: measure it where the choice is ours. Never raises.

        False when that has left the link undefined (a timeout): it must be taken down.
        """
        is_good = True
        can = self.staged is not None and peer.stage_port
        link = _Link(self._clients.get(peer.host, peer.stage_port) if can else None)
        if self.staged is None or link.client is None:
            link.why = "this side does not stage" if self.staged is None else "the prefill side does not stage"
        elif self.mode == "auto":
            try:
                link.model = self.staged.measure(link.client, peer.cluster_id)
            except (PDError, self._exceptions) as error:  # the pull that comes now will find out what is wrong
                code = getattr(error, "status_code", None)
                is_good = code is None or not judge(PULL, code).spoils
                link.why = f"not measured: {error}"
                logger.warning("link to %s:%d: %s", peer.host, peer.port, link.why)
        else:
            link.why = f"--pd-transfer {self.mode}"
        with self._lock:
            self._links[peer.cluster_id] = link
        return is_good

    def choose(self, cluster_id: int, num_bytes: int, num_pieces: int) -> ControlClient | None:
        """The staging client to use for one transfer, or None: straight.

        Raises:
            StagingError: `--pd-transfer staged` towards a prefill rank that does not stage.
        """
        with self._lock:
            link = self._links.get(cluster_id) or _Link(None, why="not linked")
            if self.mode == "staged" and link.client is None:
                raise StagingError(f"staging: --pd-transfer is staged here, but {link.why}")
            stages = link.client is not None and (
                self.mode == "staged" or (link.model is not None and link.model.prefers_staged(num_bytes, num_pieces))
            )
            link.num_staged += stages
            link.num_straight += not stages
            return link.client if stages else None

    def forget(self, cluster_id: int) -> None:
        """The link is gone."""
        with self._lock:
            self._links.pop(cluster_id, None)

    def take_withheld(self, cluster_id: int) -> list[int]:
        """The staging slots that the calling thread keeps because of that link: they are the caller's now."""
        return [] if self.staged is None else self.staged.take_withheld(cluster_id)

    def put_back(self, slots: Sequence[int]) -> None:
        """They may be used again."""
        if self.staged is not None:
            self.staged.put_back(slots)

    def describe(self, cluster_id: int) -> dict[str, Any]:
        """For /pd/status."""
        with self._lock:
            link = self._links.get(cluster_id)
            if link is None:
                return {}
            counts = {"straight": link.num_straight, "staged": link.num_staged}
            model = link.model.describe() if link.model is not None else link.why
            return {"mode": self.mode, "transfers": counts, "model": model}
