# SPDX-License-Identifier: Apache-2.0
"""Whether an instance takes new requests: one switch for all its API server processes.

It is a file in the instance's private folder: API servers share no memory, and a restarted instance has another
folder. Looked at once per request, which takes about a microsecond.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from vllm_ascend_pd.errors import PDDraining, PDRequestError
from vllm_ascend_pd.secret import RequestVerifier

FILE_NAME: Final = "draining"


class DrainAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signed body of `POST /pd/drain`."""

    draining: bool = True


class BadDrainAsk(PDRequestError):
    """The body is not a DrainAsk. Action: `vllm pd drain` sends a right one."""

    http_status = 400
    code = "pd_bad_request"


class DrainSwitch:
    """On: requests that are there go on, new ones are refused. Any thread, any process of the instance."""

    def __init__(self, runtime_dir: str, verifier: RequestVerifier) -> None:
        self._path = Path(runtime_dir) / FILE_NAME
        self.verifier = verifier

    @property
    def is_on(self) -> bool:
        """Whether new requests are refused."""
        return os.path.exists(self._path)

    def check(self) -> None:
        """Raises PDDraining when a new request has to be refused."""
        if self.is_on:
            raise PDDraining("this instance is being drained and takes no new requests; ask another one")

    def turn(self, body: bytes) -> bool:
        """Do what a request asks whose signature `verifier` has checked; whether the switch is on now.

        Raises:
            BadDrainAsk: the body.
        """
        try:
            ask = msgspec.json.decode(body or b"{}", type=DrainAsk)
        except msgspec.MsgspecError as error:
            raise BadDrainAsk(f'not a drain request, which is {{"draining": true}} or false: {error}') from error
        if ask.draining:
            self._path.touch(mode=0o600)
        else:
            self._path.unlink(missing_ok=True)
        return ask.draining
