# SPDX-License-Identifier: Apache-2.0
"""Stands in for a decode instance's control plane: a client with the deployment's secret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.engines import Engine, Zygote
from vllm_ascend_pd.control.client import ControlClient
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import Ack, CancelTransfer


def secret_of(zygote: Zygote) -> Secret:
    """The per-user secret of the engines under test."""
    return Secret((zygote.folder / "state" / "vllm-pd" / "secret").read_bytes().strip())


@contextmanager
def control_client(engine: Engine, secret: Secret) -> Iterator[ControlClient]:
    """A client of a prefill engine's peer plane."""
    client = ControlClient(f"tcp://127.0.0.1:{engine.status()['peer_port']}", secret)
    try:
        yield client
    finally:
        client.close()


def cancel(engine: Engine, secret: Secret, transfer_ids: list[str]) -> None:
    """What a decode instance sends when requests are gone."""
    with control_client(engine, secret) as client:
        for transfer_id in transfer_ids:
            assert isinstance(client.request(CancelTransfer(transfer_id=transfer_id), 5.0, 2), Ack)
