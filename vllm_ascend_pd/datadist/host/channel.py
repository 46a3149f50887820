# SPDX-License-Identifier: Apache-2.0
"""Typed messages on an authenticated connection: mutual HMAC challenge and response over framing.

Both sides prove that they know the deployment's secret before either says anything else; labels keep one side's
proof from serving as the other's. Bytes after that are not encrypted: the data plane is for a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Final, TypeVar

import msgspec

from vllm_ascend_pd.datadist.host.framing import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    BadFrame,
    ChannelError,
    ChannelTimeout,
    receive_frame,
    send_frame,
)
from vllm_ascend_pd.datadist.host.messages import (
    NONCE_BYTES,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Proof,
    decoder,
    encode,
)

_LISTENER: Final = b"vllm-pd datadist listener 1"
_DIALLER: Final = b"vllm-pd datadist dialler 1"

MessageType = TypeVar("MessageType")


class NotAuthenticated(ChannelError):
    """The peer does not know the secret."""


def send_message(sock: socket.socket, message: Message, deadline: float) -> None:
    """Send one message. Raises ChannelError."""
    send_frame(sock, encode(message), deadline)


def receive_message(
    sock: socket.socket, kind: type[MessageType], deadline: float, limit: int = MAX_FRAME_BYTES
) -> MessageType:
    """Receive one message of that kind. Raises ChannelError, BadFrame for anything else."""
    try:
        message = decode_message(receive_frame(sock, deadline, limit))
    except ChannelTimeout as error:
        raise ChannelTimeout(f"{error}, waiting for {kind.__name__}") from None
    if not isinstance(message, kind):
        raise BadFrame(f"{type(message).__name__} came, {kind.__name__} was expected")
    return message


def decode_message(body: bytes) -> Message:
    """The message of a frame. Raises BadFrame."""
    try:
        message: Message = decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"not a message: {error}") from error
    return message


def _prove(secret: bytes, label: bytes, hello: bytes, nonce: bytes) -> bytes:
    key = hmac.new(secret, b"vllm-pd datadist host", hashlib.sha256).digest()
    return hmac.new(key, label + nonce + hello, hashlib.sha256).digest()


def dial(sock: socket.socket, secret: bytes, purpose: str, link_token: bytes, deadline: float) -> None:
    """The dialler's side of a greeting. Raises ChannelError, NotAuthenticated."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = encode(Hello(protocol=PROTOCOL, purpose=purpose, nonce=nonce, link_token=link_token))
    send_frame(sock, hello, deadline)
    challenge = receive_message(sock, Challenge, deadline, MAX_GREETING_BYTES)
    expected = _prove(secret, _LISTENER, hello, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, expected):
        raise NotAuthenticated("the peer does not know our secret")
    send_message(sock, Proof(proof=_prove(secret, _DIALLER, hello, challenge.nonce)), deadline)


def greet(sock: socket.socket, secret: bytes, deadline: float) -> Hello:
    """The listener's side of a greeting. Raises ChannelError, NotAuthenticated."""
    body = receive_frame(sock, deadline, MAX_GREETING_BYTES)
    hello = decode_message(body)
    if not isinstance(hello, Hello) or hello.protocol != PROTOCOL or len(hello.nonce) != NONCE_BYTES:
        raise BadFrame(f"not a greeting of protocol {PROTOCOL}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = _prove(secret, _LISTENER, body, nonce)
    send_message(sock, Challenge(nonce=nonce, proof=proof), deadline)
    answer = receive_message(sock, Proof, deadline, MAX_GREETING_BYTES)
    if not hmac.compare_digest(answer.proof, _prove(secret, _DIALLER, body, nonce)):
        raise NotAuthenticated("the peer does not know our secret")
    return hello
