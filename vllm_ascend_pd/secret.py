# SPDX-License-Identifier: Apache-2.0
"""The deployment's shared secret: where it is kept, and everything that is derived from it.

Owns no thread; a `Secret` is immutable and may be used from any. Handoffs are signed with it (`handoff.py`), the peer
plane's CURVE keys come from it (`control/`), and the ask to a prefill instance carries a `sign_request` header.
No clock is used anywhere: freshness comes from the epoch and from nonces.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_ascend_pd.errors import PDAuthError, PDConfigError

SECRET_FLAG: Final = "--pd-secret-file"
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 64 << 10
AUTH_HEADER: Final = "X-VLLM-PD-Auth"
MAX_NONCES: Final = 1 << 17

_AUTH_VERSION: Final = "v1"
_NONCE_BYTES: Final = 16
_DIGEST_HEX: Final = 64
_GROUP_OR_OTHERS: Final = 0o066
# Errors that mean "this place cannot hold the file", so that the next place is tried.
_NOT_WRITABLE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ENOSPC, errno.EDQUOT}
    | {errno.ENOTSUP, errno.ENOSYS}
)


@dataclass(frozen=True, eq=False)
class Secret:
    """Signs, verifies and derives keys. `from_file` is False for the per-user default (loopback only)."""

    value: bytes = field(repr=False)
    from_file: bool = False

    def derive(self, purpose: str) -> bytes:
        """32 bytes for one purpose; knowing them tells nothing about the secret or about other purposes."""
        extracted = hmac.digest(b"vllm-ascend-pd secret v1", self.value, "sha256")
        return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")

    def sign(self, purpose: str, *parts: bytes) -> str:
        """Hex HMAC-SHA256 over the parts. A signature for one purpose is worth nothing for another."""
        mac = hmac.new(self.derive(f"sign {purpose}"), digestmod=hashlib.sha256)
        mac.update(struct.pack("<Q", len(parts)))
        for part in parts:
            # Lengths go in, so that moving a byte from one part to the next changes the signature.
            mac.update(struct.pack("<Q", len(part)))
            mac.update(part)
        return mac.hexdigest()

    def verify(self, signature: str, purpose: str, *parts: bytes) -> bool:
        """Whether `sign(purpose, *parts)` gives `signature`; in constant time."""
        expected = self.sign(purpose, *parts)
        return hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode())

    def curve_server_keys(self) -> tuple[bytes, bytes]:
        """(public, secret) in Z85 of every control server of this deployment."""
        return self._curve_keys("curve server")

    def curve_client_keys(self) -> tuple[bytes, bytes]:
        """(public, secret) in Z85 of every control client of this deployment."""
        return self._curve_keys("curve client")

    def _curve_keys(self, purpose: str) -> tuple[bytes, bytes]:
        import zmq
        from zmq.utils import z85

        secret_key: bytes = z85.encode(self.derive(purpose))
        public_key: bytes = zmq.curve_public(secret_key)
        return public_key, secret_key


# ---------------------------------------------------------------- where the secret is kept


def load_secret(path: Path | str | None) -> Secret:
    """The secret in `path`, or the per-user one, which is created when there is none yet.

    Raises:
        PDConfigError: the file is missing, a directory, empty, too short, or open to other users.
    """
    if path:
        return Secret(_read_secret(Path(path), f"{SECRET_FLAG} {path}"), from_file=True)
    return Secret(_user_secret(), from_file=False)


def _read_secret(path: Path, name: str, owner: int | None = None) -> bytes:
    """The stripped content of a secret file. All checks are on the opened file, so nothing can be swapped."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PDConfigError(f"{name}: cannot be read: {error.strerror}") from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
            raise PDConfigError(f"{name}: is {kind}; it has to be a file that holds the secret")
        mode = stat.S_IMODE(info.st_mode)
        if mode & _GROUP_OR_OTHERS:
            raise PDConfigError(f"{name}: mode {mode:04o} lets group or others read or write it; run: chmod 600 {path}")
        if owner is not None and info.st_uid != owner:
            raise PDConfigError(f"{name}: belongs to uid {info.st_uid}, this process runs as uid {owner}")
        content = os.read(descriptor, MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_SECRET_BYTES:
        raise PDConfigError(f"{name}: longer than {MAX_SECRET_BYTES} bytes; is it the right file?")
    value = content.strip()
    if not value:
        raise PDConfigError(f"{name}: is empty; write a secret into it: openssl rand -hex 32 > {path}")
    if len(value) < MIN_SECRET_BYTES:
        raise PDConfigError(f"{name}: has {len(value)} bytes, at least {MIN_SECRET_BYTES} are needed")
    return value


def _user_secret() -> bytes:
    home = _state_home()
    if home is not None:
        try:
            return _read_or_create(home / "vllm-pd")
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise _no_place(home, error) from error
    fallback = Path(tempfile.gettempdir()) / f"vllm-pd-{os.geteuid()}"
    try:
        _make_private(fallback)
        return _read_or_create(fallback)
    except OSError as error:
        raise _no_place(fallback, error) from error


def _no_place(place: Path, error: OSError) -> PDConfigError:
    return PDConfigError(
        f"no per-user secret can be kept in {place} ({error.strerror}); give the same {SECRET_FLAG} to all instances"
    )


def _state_home() -> Path | None:
    configured = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(configured):  # the XDG specification: relative paths are to be ignored
        return Path(configured)
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:  # a uid without a home
        return None


def _make_private(directory: Path) -> None:
    """A directory in a world-writable place: ours alone, or somebody has put a trap there."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    info = directory.lstat()
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or mode & 0o077:
        raise PDConfigError(
            f"{directory}: has to be a directory of uid {os.geteuid()} with mode 0700 (it belongs to uid "
            f"{info.st_uid}, mode {mode:04o}); remove it, or give {SECRET_FLAG}"
        )


def _read_or_create(directory: Path) -> bytes:
    """The secret in `directory`. Whoever links first wins; the others read what the winner wrote."""
    target = directory / "secret"
    name = f"per-user secret {target} (used because {SECRET_FLAG} is not given)"
    if not os.path.lexists(target):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = directory / f".secret-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, target)  # atomic, and fails when the target exists: a rename would replace it
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
    return _read_secret(target, name, owner=os.geteuid())


# ---------------------------------------------------------------- HTTP requests between instances


def sign_request(secret: Secret, method: str, path: str, body: bytes, audience: str) -> dict[str, str]:
    """The header that proves that a holder of the secret sends exactly this request to `audience`.

    `audience` is the receiving engine's epoch: a request recorded before a restart is refused after it.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    signature = secret.sign("http request", *_request_parts(method, path, body, audience, nonce))
    return {AUTH_HEADER: f"{_AUTH_VERSION} {nonce} {signature}"}


class RequestVerifier:
    """Checks `sign_request` headers and refuses a nonce that it has seen. Any thread.

    Each API server process has its own memory of nonces, and the memory is bounded.
    """

    def __init__(self, secret: Secret, audience: str, max_nonces: int = MAX_NONCES) -> None:
        self._secret = secret
        self._audience = audience
        self._max_nonces = max_nonces
        self._lock = threading.Lock()
        self._nonces: OrderedDict[str, None] = OrderedDict()

    def verify(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Return when the request is authentic and new.

        Raises:
            PDAuthError: the header is missing or malformed, the signature is wrong, or the nonce was used before.
        """
        value = next((v for k, v in headers.items() if k.lower() == AUTH_HEADER.lower()), None)
        if value is None:
            raise PDAuthError(f"header {AUTH_HEADER} is missing")
        words = value.split(" ")
        if len(words) != 3 or words[0] != _AUTH_VERSION:
            raise PDAuthError(f"header {AUTH_HEADER} is not of the form '{_AUTH_VERSION} NONCE SIGNATURE'")
        _, nonce, signature = words
        if len(nonce) != 2 * _NONCE_BYTES or len(signature) != _DIGEST_HEX:
            raise PDAuthError(f"header {AUTH_HEADER}: nonce or signature has the wrong length")
        parts = _request_parts(method, path, body, self._audience, nonce)
        if not self._secret.verify(signature, "http request", *parts):
            raise PDAuthError(
                f"header {AUTH_HEADER}: wrong signature; the sides have unlike {SECRET_FLAG}, or this engine has been "
                "restarted since the sender asked for its epoch"
            )
        # Only authentic nonces are remembered, so strangers cannot push others out.
        with self._lock:
            if nonce in self._nonces:
                raise PDAuthError(f"header {AUTH_HEADER}: this request was sent before (nonce seen)")
            self._nonces[nonce] = None
            if len(self._nonces) > self._max_nonces:
                self._nonces.popitem(last=False)


def _request_parts(
    method: str, path: str, body: bytes, audience: str, nonce: str
) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    encoded = [text.encode("utf-8", "surrogateescape") for text in (method.upper(), path, audience, nonce)]
    return (encoded[0], encoded[1], encoded[2], encoded[3], body)
