# SPDX-License-Identifier: Apache-2.0
"""`examples/compare_servers.py` over servers that answer what the test says."""

import json
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples/compare_servers.py"


class FakeServer:
    """Answers each prompt with its last token plus `shift`; lengths in `broken` with 503."""

    def __init__(self, shift=0, broken=()):
        fake = self
        self.num_asked = 0

        class Answers(BaseHTTPRequestHandler):
            def reply(self, body, status=200):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.path == "/v1/models":
                    self.reply({"data": [{"id": "m"}]})
                else:
                    self.reply({"totals": {"transfers": 7}})

            def do_POST(self):
                prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
                fake.num_asked += 1
                if len(prompt) in broken:
                    self.reply({"error": {"message": "pd_kv_unavailable"}}, 503)
                else:
                    self.reply({"choices": [{"token_ids": [prompt[-1] + shift * (len(prompt) > 9)]}]})

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve():
    made = []

    def serve(**values):
        made.append(FakeServer(**values))
        return made[-1]

    yield serve
    for fake in made:
        fake.server.shutdown()
        fake.server.server_close()


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words), "--lengths", "3,10"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, capsys.readouterr()

    return run


def test_same_answers_are_status_0_and_every_prompt_is_asked_alone_and_together(run, serve):
    ours = serve()
    code, said = run(ours.url, "--with", serve().url)
    assert code == 0
    assert "6 of 6 the same" in said.out
    assert "transfers 7" in said.out
    assert ours.num_asked == 6


def test_other_tokens_are_named_by_prompt(run, serve):
    code, said = run(serve().url, "--with", serve(shift=1).url)
    assert code == 1
    assert "same       prompt 3\n" in said.out
    assert "DIFFERENT  prompt 10\n" in said.out


def test_an_error_on_both_sides_is_not_the_same(run, serve):
    code, said = run(serve(broken=[10]).url, "--with", serve(broken=[10]).url)
    assert code == 1
    assert "HTTP 503" in said.out


def test_saved_answers_serve_as_the_other_side(run, serve, tmp_path):
    file = tmp_path / "answers.json"
    assert run(serve().url, "--save", file)[0] == 0
    assert run(serve().url, "--with", file)[0] == 0
    assert run(serve(shift=1).url, "--with", file)[0] == 1


def test_a_server_that_is_not_there_is_status_2(run, serve):
    code, said = run("http://127.0.0.1:9", "--with", serve().url)
    assert code == 2
    assert "nothing was compared" in said.err
