# SPDX-License-Identifier: Apache-2.0
"""Signatures, derived keys, and the header that authenticates an HTTP request between instances."""

from __future__ import annotations

import threading

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.errors import PDAuthError
from vllm_ascend_pd.secret import AUTH_HEADER, RequestVerifier, Secret, sign_request

VALUE = b"0123456789abcdef0123456789abcdef"
SECRET = Secret(VALUE)


def write(path, content=VALUE, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


# ------------------------------------------------------------------ signatures and keys


def test_the_value_is_in_no_representation():
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", repr([SECRET]), repr({"s": SECRET})):
        assert VALUE.decode() not in text
        assert str(VALUE)[2:-1] not in text


def test_a_secret_cannot_be_changed():
    with pytest.raises(AttributeError):
        SECRET.value = b"x"


def test_a_signature_verifies_and_is_stable():
    signature = SECRET.sign("handoff", b"a", b"b")
    assert SECRET.verify(signature, "handoff", b"a", b"b")
    assert Secret(VALUE).sign("handoff", b"a", b"b") == signature
    # Pinned: both sides of a deployment may run unlike releases.
    assert signature == "3252d3d1f27f13ad2aef1bfef0133ede5d18548c112ac85bd5d9b13482f0bac4"


@pytest.mark.parametrize(
    ("purpose", "parts"),
    [
        ("other", (b"a", b"b")),
        ("handoff", (b"ab", b"")),
        ("handoff", (b"", b"ab")),
        ("handoff", (b"ab",)),
        ("handoff", (b"a", b"b", b"")),
        ("handoff", (b"b", b"a")),
        ("handoff", ()),
    ],
)
def test_other_parts_or_purposes_do_not_verify(purpose, parts):
    assert not SECRET.verify(SECRET.sign("handoff", b"a", b"b"), purpose, *parts)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_unlike_parts_never_share_a_signature(one, two):
    assert (SECRET.sign("p", *one) == SECRET.sign("p", *two)) == (one == two)


@pytest.mark.parametrize("signature", ["", "0" * 64, "é" * 64, "\ud800", "zz"])
def test_a_signature_that_is_none_is_refused_without_an_exception(signature):
    assert not SECRET.verify(signature, "handoff", b"a")


def test_another_secret_does_not_verify():
    assert not Secret(b"another secret, also long").verify(SECRET.sign("p", b"a"), "p", b"a")


def test_derived_values_differ_by_purpose_and_secret_and_hide_the_secret():
    values = {SECRET.derive("a"), SECRET.derive("b"), SECRET.derive("sign p"), Secret(b"x" * 16).derive("a")}
    assert len(values) == 4
    assert all(len(value) == 32 for value in values)
    assert not any(VALUE in value for value in values)


def test_curve_keys_are_valid_pairs_and_the_same_everywhere():
    server, client = SECRET.curve_server_keys(), SECRET.curve_client_keys()
    assert server != client
    for public_key, secret_key in (server, client):
        assert zmq.curve_public(secret_key) == public_key
        assert len(public_key) == len(secret_key) == 40
    assert Secret(VALUE).curve_server_keys() == server
    assert Secret(b"x" * 16).curve_server_keys() != server


# ------------------------------------------------------------------ HTTP requests


REQUEST = {"method": "POST", "path": "/pd/prefill", "body": b'{"token_ids":[1,2]}', "audience": "epoch-1"}


def verify(headers, verifier=None, **changes):
    request = {**REQUEST, **changes}
    verifier = verifier or RequestVerifier(SECRET, request["audience"])
    verifier.verify(request["method"], request["path"], headers, request["body"])


def test_a_signed_request_passes():
    headers = sign_request(SECRET, **REQUEST)
    assert list(headers) == [AUTH_HEADER]
    verify(headers)


def test_header_names_are_not_case_sensitive():
    verify({AUTH_HEADER.lower(): sign_request(SECRET, **REQUEST)[AUTH_HEADER]})


@pytest.mark.parametrize(
    "change",
    [{"method": "PUT"}, {"path": "/pd/prefill2"}, {"body": b'{"token_ids":[1,3]}'}, {"audience": "epoch-2"}],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_request_or_one_for_an_engine_before_its_restart_is_refused(change):
    with pytest.raises(PDAuthError, match="signature"):
        verify(sign_request(SECRET, **REQUEST), **change)


def test_another_secret_is_refused_and_the_flag_named():
    with pytest.raises(PDAuthError, match="--pd-secret-file"):
        verify(sign_request(Secret(b"another secret, also long"), **REQUEST))


def test_a_replay_is_refused():
    verifier = RequestVerifier(SECRET, REQUEST["audience"])
    headers = sign_request(SECRET, **REQUEST)
    verify(headers, verifier)
    with pytest.raises(PDAuthError, match="before"):
        verify(headers, verifier)
    verify(sign_request(SECRET, **REQUEST), verifier)


def test_the_nonce_is_covered_by_the_signature():
    version, _nonce, signature = sign_request(SECRET, **REQUEST)[AUTH_HEADER].split(" ")
    with pytest.raises(PDAuthError, match="signature"):
        verify({AUTH_HEADER: f"{version} {'0' * 32} {signature}"})


@pytest.mark.parametrize(
    "value",
    ["", "v1", "v1 x", "v1 x y", "v2 {n} {s}", "v1 {n} {s} x", "v1  {n} {s}", "v1 {n}", "v1 {n} " + "é" * 64],
)
def test_a_malformed_header_is_refused(value):
    _, nonce, signature = sign_request(SECRET, **REQUEST)[AUTH_HEADER].split(" ")
    with pytest.raises(PDAuthError, match=AUTH_HEADER):
        verify({AUTH_HEADER: value.format(n=nonce, s=signature)})


def test_a_missing_header_is_refused():
    with pytest.raises(PDAuthError, match="missing"):
        verify({"Authorization": "Bearer x"})


def test_the_memory_of_nonces_is_bounded_and_forgeries_do_not_fill_it():
    verifier = RequestVerifier(SECRET, REQUEST["audience"], max_nonces=3)
    first = sign_request(SECRET, **REQUEST)
    verify(first, verifier)
    for _ in range(10):
        with pytest.raises(PDAuthError):
            verify(sign_request(Secret(b"another secret, also long"), **REQUEST), verifier)
    with pytest.raises(PDAuthError, match="before"):
        verify(first, verifier)
    for _ in range(5):
        verify(sign_request(SECRET, **REQUEST), verifier)
    assert len(verifier._nonces) == 3


def test_of_many_threads_with_one_header_exactly_one_passes():
    verifier = RequestVerifier(SECRET, REQUEST["audience"])
    headers = sign_request(SECRET, **REQUEST)
    barrier = threading.Barrier(8)
    passed = []

    def race():
        barrier.wait()
        try:
            verify(headers, verifier)
            passed.append(1)
        except PDAuthError:
            pass

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == [1]
