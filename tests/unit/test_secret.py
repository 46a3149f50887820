# SPDX-License-Identifier: Apache-2.0
"""The deployment's secret: files, the per-user default, signatures, keys, HTTP authentication."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from vllm_ascend_pd import secret as secret_module
from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.secret import Secret, load_secret

VALUE = b"0123456789abcdef0123456789abcdef"
SECRET = Secret(VALUE)


def write(path, content=VALUE, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


# ------------------------------------------------------------------ --pd-secret-file


def test_a_file_is_read_without_surrounding_whitespace(tmp_path):
    secret = load_secret(write(tmp_path / "s", b"\n " + VALUE + b"\r\n"))
    assert secret.value == VALUE
    assert secret.from_file


def test_a_path_may_be_a_string_or_a_link(tmp_path):
    """Kubernetes mounts secrets as links to files."""
    write(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert load_secret(str(tmp_path / "link")).value == VALUE


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_modes_that_are_private_are_accepted(tmp_path, mode):
    assert load_secret(write(tmp_path / "s", mode=mode)).value == VALUE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o606, 0o644, 0o622, 0o666, 0o777, 0o440])
def test_a_file_open_to_group_or_others_is_refused_with_its_mode_and_the_cure(tmp_path, mode):
    path = write(tmp_path / "s", mode=mode)
    with pytest.raises(PDConfigError) as caught:
        load_secret(path)
    for part in ("--pd-secret-file", str(path), f"{mode:04o}", f"chmod 600 {path}"):
        assert part in str(caught.value)


def _make_directory(path):
    path.mkdir()


def _make_fifo(path):
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "No such file"),
        (_make_directory, "a directory"),
        (_make_fifo, "not a regular file"),
        (lambda path: write(path, b""), "empty"),
        (lambda path: write(path, b" \n\t\n"), "empty"),
        (lambda path: write(path, b"123456789012345\n"), "15 bytes, at least 16"),
        (lambda path: write(path, b"x" * (65 << 10)), "longer than"),
        (lambda path: path.symlink_to(path), "symbolic links"),
    ],
    ids=["missing", "directory", "fifo", "empty", "blank", "short", "huge", "loop"],
)
def test_a_bad_file_is_refused_by_flag_path_and_reason(tmp_path, make, what):
    path = tmp_path / "s"
    make(path)
    with pytest.raises(PDConfigError) as caught:
        load_secret(path)
    for part in ("--pd-secret-file", str(path), what):
        assert part in str(caught.value)


def test_a_missing_file_is_not_created(tmp_path):
    with pytest.raises(PDConfigError):
        load_secret(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_leaks_on_success_or_refusal(tmp_path):
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", mode=0o644)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        load_secret(good)
        with pytest.raises(PDConfigError):
            load_secret(bad)
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------ the per-user default


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "home").mkdir()
    (tmp_path / "temp").mkdir()
    return tmp_path / "home"


def test_the_default_is_created_private_and_read_again(home):
    first = load_secret(None)
    path = home / ".local/state/vllm-pd/secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(bytes.fromhex(path.read_text().strip())) == 32
    assert load_secret(None).value == first.value == path.read_bytes().strip()
    assert not first.from_file
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_an_empty_path_means_the_default(home):
    assert load_secret("").from_file is False


def test_xdg_state_home_is_followed_when_absolute(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    load_secret(None)
    assert (tmp_path / "xdg/vllm-pd/secret").exists()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    load_secret(None)
    assert (home / ".local/state/vllm-pd/secret").exists()


def test_a_strict_umask_or_none_changes_nothing(home):
    old = os.umask(0)
    try:
        load_secret(None)
    finally:
        os.umask(old)
    path = home / ".local/state/vllm-pd/secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_threads_that_race_for_the_default_agree(home):
    barrier = threading.Barrier(16)
    values = []

    def race():
        barrier.wait()
        values.append(load_secret(None).value)

    threads = [threading.Thread(target=race) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == 16
    assert len(set(values)) == 1


def test_processes_that_race_for_the_default_agree(home):
    code = (
        "import sys; from vllm_ascend_pd.secret import load_secret; sys.stdin.read(1); print(load_secret(None).value)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, env=environment) for _ in range(3)]
    for process in processes:
        process.stdin.write(b"g")
        process.stdin.flush()
    values = {process.communicate(timeout=60)[0] for process in processes}
    assert len(values) == 1
    assert len(values.pop()) > 64


def test_the_loser_of_a_race_takes_the_winners_secret(home, monkeypatch):
    """The file appears between our look and our link."""
    link = os.link

    def overtaken(source, target):
        write(target, b"the winner's secret, long enough")
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    assert load_secret(None).value == b"the winner's secret, long enough"
    assert [entry.name for entry in (home / ".local/state/vllm-pd").iterdir()] == ["secret"]


def test_a_default_that_others_can_read_is_refused(home):
    load_secret(None)
    path = home / ".local/state/vllm-pd/secret"
    path.chmod(0o644)
    with pytest.raises(PDConfigError, match=f"0644.*chmod 600 {path}"):
        load_secret(None)


def test_a_default_of_another_user_is_refused(home, monkeypatch):
    load_secret(None)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(PDConfigError, match="4242"):
        load_secret(None)


def test_a_home_that_cannot_be_written_falls_back_to_a_private_temporary_directory(home, tmp_path):
    """A file in the way stops root too, which permissions would not."""
    (home / ".local").write_text("")
    first = load_secret(None)
    directory = tmp_path / "temp" / f"vllm-pd-{os.geteuid()}"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600
    assert load_secret(None).value == first.value


def test_a_user_without_a_home_gets_the_temporary_directory(home, tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(secret_module.Path, "home", no_home)
    load_secret(None)
    assert (tmp_path / "temp" / f"vllm-pd-{os.geteuid()}" / "secret").exists()


def test_a_file_system_without_links_falls_back(home, tmp_path, monkeypatch):
    link = os.link

    def unsupported(source, target):
        if str(target).startswith(str(home)):
            raise OSError(95, "Operation not supported")
        link(source, target)

    monkeypatch.setattr(os, "link", unsupported)
    load_secret(None)
    assert list((home / ".local/state/vllm-pd").iterdir()) == []
    assert (tmp_path / "temp" / f"vllm-pd-{os.geteuid()}" / "secret").exists()


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_a_trap_in_the_temporary_directory_is_refused(home, tmp_path, trap):
    (home / ".local").write_text("")
    directory = tmp_path / "temp" / f"vllm-pd-{os.geteuid()}"
    if trap == "open":
        directory.mkdir()
        directory.chmod(0o777)
    elif trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    else:
        directory.write_text("")
    with pytest.raises(PDConfigError, match="0700"):
        load_secret(None)


def test_a_temporary_directory_of_another_user_is_refused(home, tmp_path, monkeypatch):
    (home / ".local").write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(PDConfigError, match="has to be a directory of uid 4242"):
        load_secret(None)


def test_nowhere_to_write_names_the_flag(home, tmp_path):
    (home / ".local").write_text("")
    (tmp_path / "temp").rmdir()
    with pytest.raises(PDConfigError, match="--pd-secret-file"):
        load_secret(None)
