# SPDX-License-Identifier: Apache-2.0
"""A Python package index in the "simple" form: find a project's files and read them.

Speaks the JSON form (PEP 691) and, for mirrors that lack it, the HTML form (PEP 503). Only the standard
library, because the first `fetch` runs before any environment exists. The index is never trusted: what it
serves is compared with pinned hashes by `cache.py`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPResponse
from typing import Any

from tools.fork.errors import ArtefactError

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_CHUNK_BYTES = 1 << 18
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RemoteFile:
    """One file that the index offers; hash and size where it tells them."""

    name: str
    url: str
    sha256: str | None
    size: int | None


class Index:
    """One package index, at a URL such as `https://pypi.org/simple` (user and password may be in it)."""

    def __init__(self, url: str | None = None) -> None:
        full = (url or os.environ.get("PIP_INDEX_URL") or DEFAULT_INDEX).rstrip("/")
        parts = urllib.parse.urlsplit(full)
        if parts.scheme not in ("http", "https", "file"):
            raise ArtefactError(f"--index-url {full!r}: want an http(s) or file URL of a simple index")
        host = parts.netloc.rpartition("@")[2]
        self.url = urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))
        self._authorization: str | None = None
        if parts.username:
            user = urllib.parse.unquote(parts.username)
            word = urllib.parse.unquote(parts.password or "")
            self._authorization = "Basic " + base64.b64encode(f"{user}:{word}".encode()).decode()
        self._host = host
        self._files: dict[str, list[RemoteFile]] = {}

    def files(self, project: str) -> list[RemoteFile]:
        """All files of a project, in the index's order.

        Raises:
            ArtefactError: the index cannot be reached or does not know the project.
        """
        if project not in self._files:
            page = f"{self.url}/{re.sub(r'[-_.]+', '-', project).lower()}/"
            with self._open(page, _ACCEPT) as response:
                kind = response.headers.get("Content-Type", "")
                body = response.read()
            base = response.geturl()
            parse = _parse_json if "json" in kind else _parse_html
            self._files[project] = parse(body, base)
        return self._files[project]

    def find(self, project: str, name: str) -> RemoteFile:
        """The file `name` of a project.

        Raises:
            ArtefactError: see `files`, or there is no such file.
        """
        for file in self.files(project):
            if file.name == name:
                return file
        raise ArtefactError(f"{self.url} has no file {name!r} in project {project!r}")

    def download(self, file: RemoteFile) -> Iterator[bytes]:
        """The bytes of a file, in pieces.

        Raises:
            ArtefactError: the connection fails.
        """
        with self._open(file.url, "*/*") as response:
            try:
                while chunk := response.read(_CHUNK_BYTES):
                    yield chunk
            except OSError as error:
                raise ArtefactError(f"fetching {file.name} from {self._host} broke off: {error}") from error

    def _open(self, url: str, accept: str) -> HTTPResponse:
        request = urllib.request.Request(url, headers={"Accept": accept, "User-Agent": "vllm-ascend-pd-fork"})
        if self._authorization and urllib.parse.urlsplit(url).netloc == self._host:
            request.add_unredirected_header("Authorization", self._authorization)
        context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)
        except urllib.error.HTTPError as error:
            raise ArtefactError(f"{url}: HTTP {error.code} {error.reason}") from error
        except OSError as error:
            raise ArtefactError(
                f"cannot reach {url}: {getattr(error, 'reason', error)}; check the network and proxy, or name "
                f"a mirror with --index-url or PIP_INDEX_URL"
            ) from error
        return response


def _parse_json(body: bytes, base: str) -> list[RemoteFile]:
    data: dict[str, Any] = json.loads(body)
    return [
        RemoteFile(
            f["filename"],
            urllib.parse.urljoin(base, f["url"]),
            f.get("hashes", {}).get("sha256"),
            f.get("size"),
        )
        for f in data["files"]
    ]


class _Links(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.found: list[RemoteFile] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note each link to a file."""
        href = dict(attrs).get("href")
        if tag != "a" or not href:
            return
        url, _, fragment = urllib.parse.urljoin(self.base, href).partition("#")
        digest = re.search(r"sha256=([0-9a-f]{64})", fragment)
        name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        self.found.append(RemoteFile(name, url, digest[1] if digest else None, None))


def _parse_html(body: bytes, base: str) -> list[RemoteFile]:
    links = _Links(base)
    links.feed(body.decode("utf-8", "replace"))
    return links.found
