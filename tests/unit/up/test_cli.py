# SPDX-License-Identifier: Apache-2.0
import http.server
import json
import threading

import pytest

from vllm_ascend_pd.up import cli
from vllm_ascend_pd.up.cli import main, split_serve_args

STATUS = {
    "role": "decode",
    "peers": [{"url": "http://p:1", "linked": True}, {"url": "http://p:2", "linked": False, "why": "dead"}],
    "leases": [],
    "totals": {"tokens_loaded_remotely": 12, "seconds": {"pull": 0.25}},
}


@pytest.fixture
def server():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            code, body = {
                "/pd/status": (200, json.dumps(STATUS)),
                "/list/pd/status": (200, "[]"),
                "/text/pd/status": (200, "hello"),
                "/broken/pd/status": (500, "oops"),
            }.get(self.path, (404, "{}"))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_all_after_the_first_dashes_goes_to_serve_as_written():
    assert split_serve_args(["up", "m", "--", "--a_b", "--", "c"]) == (["up", "m"], ("--a_b", "--", "c"))
    assert split_serve_args(["up", "m"]) == (["up", "m"], ())


def test_only_the_word_pd_is_taken_from_vllms_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "main", lambda words: seen.append(words) or 7)
    for argv in (["vllm"], ["vllm", "serve", "pd"], ["vllm", "--help"]):
        cli.run_pd_command(argv)
    assert not seen
    with pytest.raises(SystemExit) as stop:
        cli.run_pd_command(["vllm", "pd", "up", "m", "--", "x"])
    assert stop.value.code == 7
    assert seen == [["up", "m", "--", "x"]]


def test_the_options_of_up_reach_the_plan(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "run_up", lambda parsed, serve_args: seen.append((parsed, serve_args)) or 0)
    assert main(["up", "m", "--prefill", "2", "--decode", "3", "--port-base", "7000", "--", "--dtype", "float32"]) == 0
    ((parsed, serve_args),) = seen
    assert (parsed.model, parsed.prefill, parsed.decode, parsed.port_base) == ("m", 2, 3, 7000)
    assert serve_args == ("--dtype", "float32")


@pytest.mark.parametrize("words", [[], ["up"], ["up", "m", "--prefil"], ["up", "m", "x"], ["status"], ["drain"]])
def test_a_wrong_command_line_exits_with_two(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: vllm pd" in capsys.readouterr().err


def test_serve_arguments_are_refused_where_nothing_is_served(capsys):
    with pytest.raises(SystemExit):
        main(["status", "http://x", "--", "--dtype", "float32"])
    assert "--dtype float32" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["up", "m", "--prefill", "0"], ["up", "m", "--", "--port", "1"]])
def test_a_wrong_value_exits_with_one_and_names_the_flag(words, capsys):
    assert main(words) == 1
    assert f"vllm pd up: {words[2] if words[2] != '--' else words[3]}" in capsys.readouterr().err


def test_a_model_folder_that_is_not_there_is_refused_before_anything_starts(tmp_path, capsys):
    assert main(["up", str(tmp_path / "none")]) == 1
    assert f"MODEL: {tmp_path}/none does not exist" in capsys.readouterr().err


def test_status_as_json_is_what_the_server_said(server, capsys):
    assert main(["status", server, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_shows_every_value(server, capsys):
    assert main(["status", server + "/"]) == 0
    shown = capsys.readouterr().out
    for word in ("decode", "http://p:1", "dead", "tokens_loaded_remotely", "12", "pull=0.25", "none"):
        assert word in shown


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/other", "without --pd-role"),
        ("/list", "answers a list"),
        ("/text", "does not answer JSON"),
        ("/broken", "answers 500: oops"),
    ],
)
def test_an_answer_that_is_no_status_is_explained(server, path, said, capsys):
    assert main(["status", server + path]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[bad"])
def test_an_instance_that_does_not_answer_is_named_with_what_to_check(url, capsys):
    assert main(["status", url]) == 1
    message = capsys.readouterr().err
    assert url in message
    assert "check that it runs" in message


def test_only_the_verbs_that_work_are_offered(capsys):
    with pytest.raises(SystemExit):
        main(["empty"])
    assert "(choose from up, status, drain, bench, doctor, ranktable)" in capsys.readouterr().err.replace("'", "")
