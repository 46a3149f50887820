# SPDX-License-Identifier: Apache-2.0
"""Each check of one host, with injected facts: ok, warn, fail, not applicable, and what is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.unit.doctor.hosts import OWN, make_host
from vllm_ascend_pd.ascend.pairing import Verdict
from vllm_ascend_pd.doctor.check import Check, State
from vllm_ascend_pd.doctor.checks import container, memory, network, secret_file, software
from vllm_ascend_pd.doctor.host import Host
from vllm_ascend_pd.memory.available import AvailableMemory

OK, WARN, FAIL, NA = State.OK, State.WARN, State.FAIL, State.NOT_APPLICABLE
GIB = 1 << 30


def told(check: Check, state: State, *words: str) -> None:
    """The state, the words, and that there is something to do exactly when there should be."""
    assert check.state is state, check
    for word in words:
        assert word in f"{check.seen} {check.todo}", check
    assert bool(check.todo) == (state in (WARN, FAIL)), check


class TestSoftware:
    def test_versions_keep_the_words_and_levels_of_the_pairing(self):
        verdicts = [
            Verdict("vllm", "ok", "0.23.0+pd.1.ascend (lane ascend)"),
            Verdict("torch-npu", "warn", "2.10.0.post3", "checked with another"),
            Verdict("CANN", "fail", "8.5.0", "install CANN 9.1.0"),
            Verdict("VLLM_VERSION", "fail", "0.22.0", "unset it"),
        ]
        checks = software.check_versions(verdicts, "0.23.0+pd.1.ascend")
        assert [(c.key, c.state) for c in checks] == [
            ("software.vllm", OK),
            ("software.torch-npu", WARN),
            ("software.cann", FAIL),
            ("software.vllm-version", FAIL),
        ]
        told(checks[2], FAIL, "8.5.0", "install CANN 9.1.0")

    def test_without_an_npu_nothing_has_to_pair(self):
        checks = software.check_versions([Verdict("npu", "ok", "no NPU on this host")], "0.32.0+pd.1.cpu")
        told(checks[0], OK, "0.32.0+pd.1.cpu")
        told(checks[1], NA, "no NPU")

    def test_a_missing_vllm_fails(self):
        told(software.check_versions([], None)[0], FAIL, "not installed")

    def test_a_library_that_cannot_be_loaded_fails_with_its_reason(self):
        def broken():
            raise ImportError("wrong ELF class")

        told(software.check_library(broken), FAIL, "wrong ELF class")
        told(software.check_library(lambda: None), OK, "ABI")

    def test_npus_without_llm_datadist_fail(self, tmp_path: Path):
        host = make_host(tmp_path, num_npus=2)
        told(software.check_data_plane(host, lambda name: None), FAIL, "2 NPUs", "llm_datadist", "set_env.sh")
        told(software.check_data_plane(host, lambda name: object()), OK, "CANN")

    def test_without_npus_the_host_implementation_is_used(self, tmp_path: Path):
        told(software.check_data_plane(make_host(tmp_path), lambda name: None), OK, "host implementation")


class TestMemory:
    @pytest.mark.parametrize(
        ("available", "state"),
        [
            (AvailableMemory(64 * GIB), OK),
            (AvailableMemory(64 * GIB, 1 * GIB, 4 * GIB), WARN),
            (AvailableMemory(64 * GIB, 100 << 20, 4 * GIB), FAIL),
            (AvailableMemory(200 << 20), FAIL),
        ],
    )
    def test_room_for_the_arena_is_the_smaller_of_machine_and_control_group(self, available, state):
        told(memory.check_arena_room(available), state, available.describe(), "/dev/shm")

    @pytest.mark.parametrize(
        ("hint", "probe", "state"),
        [
            ("always within_size advise [never] deny force", ("4 of 4 MiB", ""), OK),
            ("always within_size [advise] never deny force", ("4 of 4 MiB", ""), OK),
            ("always within_size advise [never] deny force", ("0 of 4 MiB", "MADV_COLLAPSE: Invalid argument"), WARN),
            ("always within_size [advise] never deny force", ("2 of 4 MiB", ""), WARN),
            ("", ("0 of 4 MiB", "MADV_COLLAPSE: Invalid argument"), WARN),
        ],
    )
    def test_huge_pages_are_judged_by_what_a_probe_got(self, tmp_path: Path, hint, probe, state):
        host = make_host(tmp_path, {memory.SHMEM_ENABLED: hint})
        told(memory.check_huge_pages(host, lambda: probe), state, probe[0], *([probe[1]] if probe[1] else []))

    def test_the_probe_of_this_machine_is_read_right(self):
        told_pages, reason = memory.probe_huge_pages()
        assert told_pages.endswith("of 4 MiB")
        assert "(" not in reason

    def test_an_arena_that_cannot_be_made_fails(self, tmp_path: Path):
        def probe():
            raise OSError(errno.ENOSYS, "memfd_create is not there")

        told(memory.check_huge_pages(make_host(tmp_path), probe), FAIL, "memfd_create is not there")

    @pytest.mark.parametrize(("limit", "state"), [(1024, WARN), (4096, OK), (-1, OK)])
    def test_few_open_files_are_warned_about(self, tmp_path: Path, limit, state):
        told(memory.check_open_files(make_host(tmp_path, open_files=limit)), state)

    @pytest.mark.parametrize(
        ("num_npus", "limit", "state"), [(0, 65536, NA), (8, 65536, WARN), (8, -1, OK), (8, 64 * GIB, OK)]
    )
    def test_locked_memory_matters_with_npus_only(self, tmp_path: Path, num_npus, limit, state):
        told(memory.check_locked_memory(make_host(tmp_path, num_npus=num_npus, locked=limit)), state)


class TestAddress:
    @pytest.mark.parametrize(
        ("listen", "state", "word"),
        [
            (OWN, OK, OWN),
            ("127.0.0.1", OK, "this machine only"),
            ("::1", OK, "this machine only"),
            ("10.9.9.9", FAIL, "no address of this host"),
            ("0.0.0.0", OK, f"peers are told {OWN}"),
            ("nowhere", FAIL, "does not resolve"),
            ("here", OK, "here"),
            ("debian", FAIL, "would dial themselves"),
            ("2001:db8::7", FAIL, "no IPv4"),
        ],
    )
    def test_the_address_must_be_this_hosts(self, tmp_path: Path, listen, state, word):
        names = {"here": [OWN], "debian": ["127.0.1.1"], "localhost": ["127.0.0.1"]}
        told(network.check_address(make_host(tmp_path, names=names), listen, "--host"), state, "--host", word)

    @pytest.mark.parametrize(
        ("own", "state", "word"),
        [
            ("127.0.0.1", WARN, "no default route"),
            ("203.0.113.5", FAIL, "VLLM_HOST_IP"),  # of a NAT, say
            ("2001:db8::7", FAIL, "IPv6"),
        ],
    )
    def test_all_addresses_need_one_to_tell(self, tmp_path: Path, own, state, word):
        told(network.check_address(make_host(tmp_path, own=own), "0.0.0.0"), state, word)

    def test_the_real_host_knows_its_addresses(self):
        host = Host()
        assert host.is_own("127.0.0.1")
        assert not host.is_own("198.51.100.77")
        assert host.is_own(host.own_address())


class TestPorts:
    def test_a_taken_port_fails_and_names_who_has_it(self, tmp_path: Path):
        host = make_host(tmp_path, taken={8200: errno.EADDRINUSE, 80: errno.EACCES})
        told(network.check_port(host, OWN, 8200), FAIL, "--pd-listen", "8200", "python (pid 4711)")
        told(network.check_port(host, OWN, 80), FAIL, "privileges")
        told(network.check_port(host, OWN, 8201), OK, "free")
        told(network.check_port(host, OWN, 0), OK, "chooses")
        told(network.check_port(host, OWN, 70000), FAIL, "65535")

    def test_the_real_host_finds_a_listener_by_its_port(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            check = network.check_port(Host(), "127.0.0.1", port)
            told(check, FAIL, f"pid {os.getpid()}")
        told(network.check_port(Host(), "127.0.0.1", port), OK)

    @pytest.mark.parametrize(
        ("num_npus", "port", "files", "state"),
        [
            (0, 20001, {}, NA),
            (8, 20001, {}, FAIL),
            (8, 35999, {}, FAIL),
            (8, 19950, {}, FAIL),  # the ports of the data plane come after it
            (8, 36000, {"/proc/sys/net/ipv4/ip_local_port_range": "36000\t60999"}, OK),
            (8, 8200, {"/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999"}, WARN),
            (
                8,
                8200,
                {
                    "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
                    "/proc/sys/net/ipv4/ip_local_reserved_ports": "1-3,20000-35999",
                },
                OK,
            ),
        ],
    )
    def test_ports_that_cann_takes_are_kept_free(self, tmp_path: Path, num_npus, port, files, state):
        told(network.check_npu_ports(make_host(tmp_path, files, num_npus=num_npus), port), state)


class TestSecret:
    def test_the_file_is_judged_as_at_the_start(self, tmp_path: Path):
        path = tmp_path / "secret"
        told(secret_file.check_secret(str(path), None), FAIL, str(path))
        path.write_text("0123456789abcdef" * 2)
        path.chmod(0o644)
        told(secret_file.check_secret(str(path), None), FAIL, "chmod 600")
        path.chmod(0o600)
        check = secret_file.check_secret(str(path), "0.0.0.0")
        told(check, OK, "32 bytes")
        assert "0123" not in str(check)

    def test_without_a_file_only_loopback_will_do(self):
        told(secret_file.check_secret(None, "0.0.0.0"), FAIL, "--pd-secret-file")
        told(secret_file.check_secret(None, "127.0.0.1"), NA)
        told(secret_file.check_secret(None, None), NA)


class TestContainer:
    @pytest.mark.parametrize(
        ("uid_map", "words"),
        [
            ("         0          0 4294967295\n", ["the host's"]),
            ("         0     100000      65536\n", ["uid 0 here is uid 100000", "secret file"]),
        ],
    )
    def test_id_mapping_is_told(self, tmp_path: Path, uid_map, words):
        told(container.check_id_mapping(make_host(tmp_path, {"/proc/self/uid_map": uid_map})), OK, *words)

    def test_mapping_is_tried_out(self, tmp_path: Path):
        def refused():
            raise PermissionError(errno.EPERM, "seccomp says no")

        host = make_host(tmp_path)
        told(container.check_mapping(host, refused), WARN, "seccomp says no", "TCP")
        told(container.check_mapping(host, lambda: None), OK)
        told(container.check_mapping(make_host(tmp_path / "npu", num_npus=1), refused), NA)
        (tmp_path / ".dockerenv").touch()
        told(container.check_mapping(host, lambda: None), OK, "same network namespace")
        assert container.find_container(host) == "Docker"

    def test_mapping_works_on_this_machine(self):
        container.probe_mapping()

    def test_clocks_are_not_compared(self):
        told(container.check_clocks(), OK, "monotonic")
