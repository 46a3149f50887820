# SPDX-License-Identifier: Apache-2.0
"""With real processes (a stub server that starts in milliseconds), because that is what supervision is about."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.up.machine import check_ports, find_free_ports, prepare_machine
from vllm_ascend_pd.up.plan import UpOptions, plan_deployment
from vllm_ascend_pd.up.supervise import InstanceFailed, Supervisor, describe_exit, read_tail

STUB = (sys.executable, str(Path(__file__).with_name("stub_server.py")))
ROOT = Path(__file__).resolve().parents[3]


class Recorder:
    def __init__(self):
        self.events = []

    def starting(self, instance):
        self.events.append(("starting", instance.name))

    def waiting(self, instance, elapsed_s, tail):
        pass

    def ready(self, instance, elapsed_s):
        self.events.append(("ready", instance.name))

    def stopping(self, instance):
        self.events.append(("stopping", instance.name))

    def killed(self, instance):
        self.events.append(("killed", instance.name))

    def of(self, kind):
        return [name for what, name in self.events if what == kind]


@pytest.fixture
def deploy(tmp_path):
    """deploy(model, …) -> (supervisor, recorder); all is stopped at the end of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PD_ROLE", "decode")  # of the user's shell; must not reach a server
        opened = []

        def make(model, grace_s=10.0, **counts):
            options = UpOptions(model, **counts)
            machine = prepare_machine(options, log_dir=tmp_path / "logs", serve_command=STUB)
            recorder = Recorder()
            supervisor = Supervisor(plan_deployment(options, machine.__enter__()), recorder, grace_s=grace_s)
            opened.append((supervisor, machine))
            return supervisor, recorder

        yield make
        for supervisor, machine in opened:
            supervisor.stop_all()
            machine.__exit__(None, None, None)


def pids(supervisor):
    return [child.process.pid for child in supervisor._children]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)  # another process's doing: there is no clock to inject


def test_all_become_ready_and_all_are_stopped_decode_before_prefill(deploy):
    supervisor, recorder = deploy("ok", num_prefill=2)
    supervisor.start()
    supervisor.wait_ready(20)
    assert sorted(recorder.of("ready")) == ["decode-0", "prefill-0", "prefill-1"]
    supervisor.check_alive()
    started = pids(supervisor)
    supervisor.stop_all()
    assert recorder.of("stopping") == ["decode-0", "prefill-0", "prefill-1"]
    assert recorder.of("killed") == []
    assert not any(is_alive(pid) for pid in started)


def test_servers_get_their_cores_and_not_the_callers_pd_variables(deploy):
    supervisor, _ = deploy("ok")
    supervisor.start()
    supervisor.wait_ready(20)
    instance = supervisor.deployment.instances[0]
    cores = instance.env.get("VLLM_CPU_OMP_THREADS_BIND")
    assert f"cores: {cores} role: None\n" in instance.log.read_text()


def test_a_server_that_dies_is_named_with_the_end_of_its_log(deploy):
    supervisor, _ = deploy("decode-dies")
    supervisor.start()
    with pytest.raises(InstanceFailed) as failure:
        supervisor.wait_ready(20)
    message = str(failure.value)
    assert message.startswith("decode-0 (http://127.0.0.1:")
    assert "exit code 3" in message
    assert "ValueError: the reason" in message
    assert "line 39" in message
    assert "line 20" not in message, "twenty lines, not the whole log"
    started = pids(supervisor)
    supervisor.stop_all()
    assert not any(is_alive(pid) for pid in started)


def test_a_server_that_dies_later_ends_the_watch(deploy):
    supervisor, _ = deploy("ok")
    supervisor.start()
    supervisor.wait_ready(20)
    os.kill(pids(supervisor)[0], signal.SIGKILL)
    with pytest.raises(InstanceFailed, match=r"prefill-0 .* signal SIGKILL"):
        supervisor.watch()


def test_a_server_that_never_becomes_healthy_is_given_up_by_name(deploy):
    supervisor, recorder = deploy("sick")
    supervisor.start()
    with pytest.raises(InstanceFailed, match="prefill-0 .* is not healthy after 1 s"):
        supervisor.wait_ready(1)
    assert recorder.of("ready") == []


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(deploy):
    supervisor, recorder = deploy("stubborn", grace_s=0.3)
    supervisor.start()
    supervisor.wait_ready(20)
    started = pids(supervisor)
    supervisor.stop_all()
    assert sorted(recorder.of("killed")) == ["decode-0", "prefill-0"]
    assert not any(is_alive(pid) for pid in started)


def test_what_a_server_leaves_behind_is_ended_too(deploy):
    supervisor, _ = deploy("parent")
    supervisor.start()
    supervisor.wait_ready(20)
    log = supervisor.deployment.instances[0].log.read_text()
    grandchild = int(re.search(r"grandchild (\d+)", log)[1])
    assert is_alive(grandchild)
    supervisor.stop_all()
    wait_until(lambda: not is_alive(grandchild))


def test_one_instance_can_be_stopped_and_the_rest_goes_on(deploy):
    supervisor, _ = deploy("ok", compare=True)
    supervisor.start()
    supervisor.wait_ready(20)
    supervisor.stop(supervisor.deployment.instances[2])
    supervisor.check_alive()
    assert [is_alive(pid) for pid in pids(supervisor)] == [True, True, False]


@pytest.fixture
def run_up(tmp_path):
    """run_up(model): `vllm pd up` in a process of its own, over the stub."""
    running = []

    def run(model):
        code = (
            "import functools, sys, vllm_ascend_pd.up.cli as cli;"
            f"cli.prepare_machine = functools.partial(cli.prepare_machine, serve_command={STUB!r});"
            "sys.exit(cli.main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "up", model, "--log-dir", str(tmp_path / "logs"), "--", "--dtype", "x"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, env=env, cwd=tmp_path, **pipes))
        return running[-1]

    yield run
    for process in running:
        process.kill()  # its servers end with it
        process.communicate()


def wait_announced(up):
    shown = []
    for line in iter(up.stdout.readline, ""):
        shown.append(line)
        if "State: vllm pd status" in line:
            break
    assert any("/v1/completions" in line for line in shown), up.stderr.read()


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_is_no_failure(run_up, tmp_path, number):
    up = run_up("ok")
    wait_announced(up)
    servers = children_of(up.pid)
    assert len(servers) == 2
    assert "'--dtype', 'x'" in (tmp_path / "logs/decode-0.log").read_text()
    secrets = list(tmp_path.glob("vllm-pd-up-*/secret"))
    assert [oct(path.stat().st_mode & 0o777) for path in secrets] == ["0o600"]
    up.send_signal(number)
    _, errors = up.communicate(timeout=20)
    assert up.returncode == 0, errors
    assert not any(is_alive(pid) for pid in servers)
    assert not list(tmp_path.glob("vllm-pd-up-*")), "the secret is removed"


def test_a_killed_supervisor_leaves_no_server(run_up):
    up = run_up("ok")
    wait_announced(up)
    servers = children_of(up.pid)
    assert len(servers) == 2
    up.kill()
    up.communicate(timeout=10)
    wait_until(lambda: not any(is_alive(pid) for pid in servers))


def test_a_failed_start_exits_with_one_and_says_which_server(run_up):
    up = run_up("dies")
    out, errors = up.communicate(timeout=30)
    assert up.returncode == 1
    assert re.search(r"vllm pd up: (prefill|decode)-0", errors)  # both die; whichever is seen first is named
    assert "ValueError: the reason" in errors
    assert "/v1/completions" not in out


def test_a_taken_port_is_refused_by_number():
    base = find_free_ports(1)[0]
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base))
        taken.listen()
        with pytest.raises(PDConfigError, match=f"--port-base {base}: port {base} "):
            check_ports(base, 2)


def test_free_ports_are_all_different():
    ports = find_free_ports(20)
    assert len(set(ports)) == 20


def test_the_tail_of_a_log_has_no_progress_bars_and_no_empty_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n\nLoading: 10%\rLoading: 100%\n" + "x\n" * 3)
    assert read_tail(log, 4) == ["Loading: 100%", "x", "x", "x"]
    assert read_tail(tmp_path / "none") == []


@pytest.mark.parametrize(("code", "words"), [(1, "exit code 1"), (-9, "signal SIGKILL"), (-99, "signal 99")])
def test_an_exit_status_is_told_in_words(code, words):
    assert describe_exit(code) == words
