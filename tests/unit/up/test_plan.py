# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from vllm_ascend_pd.errors import PDConfigError
from vllm_ascend_pd.up.plan import (
    Machine,
    Role,
    UpOptions,
    find_value,
    list_roles,
    plan_deployment,
    split_cores,
)

SECRET = Path("/run/secret")


def plan(options, cores=(0, 1, 2, 3), on_cpu=True):
    ports = tuple(range(9000, 9000 + len(list_roles(options))))
    return plan_deployment(options, Machine(("vllm", "serve"), ports, cores, on_cpu, Path("/logs"), SECRET))


def value(instance, flag):
    return instance.command[instance.command.index(flag) + 1]


def test_a_pair_gets_roles_ports_logs_and_one_secret():
    prefill, decode = plan(UpOptions("m")).instances
    assert (prefill.name, decode.name) == ("prefill-0", "decode-0")
    assert [value(i, "--port") for i in (prefill, decode)] == ["9000", "9001"]
    assert [value(i, "--pd-role") for i in (prefill, decode)] == ["prefill", "decode"]
    assert {value(i, "--pd-secret-file") for i in (prefill, decode)} == {str(SECRET)}
    assert decode.log == Path("/logs/decode-0.log")
    assert prefill.command[:3] == ("vllm", "serve", "m")


def test_only_decode_instances_are_told_of_all_prefill_instances():
    deployment = plan(UpOptions("m", num_prefill=2, num_decode=2))
    for decode in deployment.of_role(Role.DECODE):
        at = decode.command.index("--pd-prefill")
        assert decode.command[at + 1 : at + 3] == ("http://127.0.0.1:9000", "http://127.0.0.1:9001")
    assert all("--pd-prefill" not in prefill.command for prefill in deployment.of_role(Role.PREFILL))


def test_nothing_listens_beyond_loopback():
    for instance in plan(UpOptions("m", num_decode=2, compare=True)).instances:
        assert value(instance, "--host") == "127.0.0.1"
        if instance.role is not Role.AGGREGATED:
            assert value(instance, "--pd-listen") == "127.0.0.1"


def test_instances_share_no_core_while_there_are_enough():
    binds = [i.env["VLLM_CPU_OMP_THREADS_BIND"] for i in plan(UpOptions("m", num_decode=2), range(7)).instances]
    assert binds == ["0,1", "2,3", "4,5,6"]


def test_two_cores_serve_four_instances_in_turn():
    binds = [i.env["VLLM_CPU_OMP_THREADS_BIND"] for i in plan(UpOptions("m", 2, 2), (0, 1)).instances]
    assert binds == ["0", "1", "0", "1"]


@pytest.mark.parametrize(
    ("cores", "num_shares", "expected"),
    [
        ((4, 5), 2, [(4,), (5,)]),
        ((4, 5, 6), 2, [(4,), (5, 6)]),
        ((4,), 2, [(4,), (4,)]),
        ((), 2, [(), ()]),
    ],
)
def test_cores_are_split_evenly(cores, num_shares, expected):
    assert split_cores(cores, num_shares) == expected


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tensor_parallel_size", "-tp"])
def test_each_tensor_parallel_rank_has_cores_of_its_own(flag):
    prefill, decode = plan(UpOptions("m", serve_args=(flag, "2"))).instances
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"


def test_cpu_defaults_are_small_and_give_way_to_the_user():
    kept = plan(UpOptions("m")).instances[0]
    assert value(kept, "--kv-cache-memory-bytes") == str(256 << 20)
    theirs = plan(UpOptions("m", serve_args=("--kv_cache_memory_bytes=7", "--dtype", "float32"))).instances[0]
    assert "--kv-cache-memory-bytes" not in theirs.command
    assert theirs.command[-3:] == ("--kv_cache_memory_bytes=7", "--dtype", "float32")
    assert value(theirs, "--gpu-memory-utilization") == "0.1"


def test_no_cpu_setting_is_given_to_another_platform():
    instance = plan(UpOptions("m"), on_cpu=False).instances[0]
    assert "--gpu-memory-utilization" not in instance.command
    assert "VLLM_CPU_OMP_THREADS_BIND" not in instance.env


def test_the_server_to_compare_with_has_the_same_arguments_and_cores_and_no_role():
    deployment = plan(UpOptions("m", compare=True, serve_args=("--dtype", "float32")))
    aggregated, decode = deployment.of_role(Role.AGGREGATED)[0], deployment.of_role(Role.DECODE)[0]
    assert not any(word.startswith("--pd-") for word in aggregated.command)
    assert aggregated.command[-2:] == ("--dtype", "float32")
    assert aggregated.env == decode.env


def test_clients_are_told_the_name_under_which_the_model_is_served():
    assert plan(UpOptions("/models/x")).model == "/models/x"
    assert plan(UpOptions("/models/x", serve_args=("--served-model-name", "x"))).model == "x"


@pytest.mark.parametrize(("prefill", "decode", "named"), [(0, 1, "--prefill"), (1, 0, "--decode"), (1, -2, "--decode")])
def test_a_count_below_one_is_refused_by_name(prefill, decode, named):
    with pytest.raises(PDConfigError, match=named):
        plan(UpOptions("m", prefill, decode))


@pytest.mark.parametrize("words", [("--port", "1"), ("--pd_role=decode",), ("--pd-secret-file=x",)])
def test_an_argument_that_up_decides_is_refused_by_name(words):
    name = words[0].partition("=")[0].replace("_", "-")
    with pytest.raises(PDConfigError, match=name):
        plan(UpOptions("m", serve_args=words))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("--a-b", "1"), "1"), (("--a_b=1", "--a-b", "2"), "2"), (("--a-b",), ""), (("--a",), None), ((), None)],
)
def test_the_last_spelling_of_a_flag_counts(arguments, expected):
    assert find_value(arguments, "--a-b") == expected
