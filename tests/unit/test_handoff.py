# SPDX-License-Identifier: Apache-2.0
"""Handoffs: every field is signed, the JSON round trip keeps them, malformed ones are refused by field."""

from __future__ import annotations

import hashlib
import json
import struct
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.errors import PDHandoffError
from vllm_ascend_pd.handoff import (
    HANDOFF_KEY,
    MAX_BLOCK_IDS,
    MAX_GROUPS,
    MAX_INT,
    from_kv_transfer_params,
    prompt_digest,
    sign_handoff,
    to_kv_transfer_params,
    verify_handoff,
)
from vllm_ascend_pd.secret import Secret
from vllm_ascend_pd.wire import MAX_FRAME_BYTES, DeliverHandoff, Handoff

SECRET = Secret(b"a secret of a deployment")
OTHER = Secret(b"a secret of another deployment")

names = st.text(min_size=1, max_size=40)
positive = st.integers(1, MAX_INT)
block_ids = st.lists(st.lists(st.integers(0, MAX_INT), max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
FIELDS = {
    "transfer_id": names,
    "lease_id": names,
    "engine_id": names,
    "epoch": names,
    "host": names,
    "port": st.integers(1, 65535),
    "num_tokens": positive,
    "prompt_digest": st.binary(min_size=32, max_size=32).map(bytes.hex),
    "block_ids": block_ids,
    "layout": names,
    "lease_ms": positive,
}
handoffs = st.builds(Handoff, **FIELDS)

PLAIN = Handoff(
    transfer_id="engine/epoch/request/1",
    lease_id="lease",
    engine_id="engine",
    epoch="epoch",
    host="::1",
    port=4711,
    num_tokens=70,
    prompt_digest=prompt_digest(range(70)),
    block_ids=((1, 2, 3), (0, 0, 9)),
    layout="layout",
    lease_ms=30000,
)


def params_of(**changes):
    params = json.loads(json.dumps(to_kv_transfer_params(sign_handoff(PLAIN, SECRET), "r", 1)))
    params[HANDOFF_KEY] |= changes
    return params


# ------------------------------------------------------------------ digest


def test_the_digest_is_sha256_over_the_salt_and_little_endian_int64_tokens():
    tokens = [0, 1, 255, 256, 151_643, 2**31]
    expected = hashlib.sha256(struct.pack("<Q", 4) + b"salt" + struct.pack("<6q", *tokens)).hexdigest()
    assert prompt_digest(tokens, "salt") == expected
    assert prompt_digest(tuple(tokens), "salt") == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), max_size=8), st.lists(st.integers(0, 1 << 40), max_size=8), names, names)
def test_digests_are_equal_exactly_when_tokens_and_salt_are(one, two, salt_one, salt_two):
    same = (one, salt_one) == (two, salt_two)
    assert (prompt_digest(one, salt_one) == prompt_digest(two, salt_two)) == same


def test_a_salt_cannot_pose_as_a_token():
    assert prompt_digest([1], "") != prompt_digest([], "\x01" + "\x00" * 7)


def test_a_long_prompt_is_digested_in_little_time():
    tokens = list(range(131_072))
    started = time.process_time()
    prompt_digest(tokens)
    assert time.process_time() - started < 0.25  # a loop of struct.pack takes longer; it runs on D's step path


# ------------------------------------------------------------------ signature


@settings(max_examples=50, deadline=None)
@given(handoffs)
def test_a_signed_handoff_verifies(handoff):
    verify_handoff(sign_handoff(handoff, SECRET), SECRET)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_any_field_breaks_the_signature(data):
    signed = sign_handoff(data.draw(handoffs), SECRET)
    field = data.draw(st.sampled_from(sorted(FIELDS)))
    value = data.draw(FIELDS[field].filter(lambda value: value != getattr(signed, field)))
    with pytest.raises(PDHandoffError, match="signature"):
        verify_handoff(msgspec.structs.replace(signed, **{field: value}), SECRET)


def test_every_field_of_the_message_is_in_the_property_above():
    assert set(FIELDS) == set(Handoff.__struct_fields__) - {"signature"}


@settings(max_examples=50, deadline=None)
@given(handoffs, handoffs)
def test_a_signature_of_one_handoff_is_no_signature_of_another(one, two):
    stolen = msgspec.structs.replace(two, signature=sign_handoff(one, SECRET).signature)
    if one == two:
        verify_handoff(stolen, SECRET)
    else:
        with pytest.raises(PDHandoffError):
            verify_handoff(stolen, SECRET)


@pytest.mark.parametrize(
    "moved",
    [((1, 2), (3, 0, 0, 9)), ((1, 2, 3, 0), (0, 9)), ((1, 2, 3, 0, 0, 9),), ((0, 0, 9), (1, 2, 3))],
)
def test_blocks_cannot_be_moved_between_groups(moved):
    signed = sign_handoff(PLAIN, SECRET)
    with pytest.raises(PDHandoffError):
        verify_handoff(msgspec.structs.replace(signed, block_ids=moved), SECRET)


def test_an_unsigned_handoff_is_refused_by_name():
    with pytest.raises(PDHandoffError, match=r"engine/epoch/request/1.*not signed"):
        verify_handoff(PLAIN, SECRET)


def test_another_secret_is_refused_and_the_flag_named():
    with pytest.raises(PDHandoffError, match="--pd-secret-file"):
        verify_handoff(sign_handoff(PLAIN, OTHER), SECRET)


def test_signing_again_gives_the_same_signature():
    signed = sign_handoff(PLAIN, SECRET)
    assert sign_handoff(signed, SECRET) == signed


# ------------------------------------------------------------------ kv_transfer_params


@settings(max_examples=50, deadline=None)
@given(handoffs)
def test_a_handoff_survives_json_and_stays_signed(handoff):
    signed = sign_handoff(handoff, SECRET)
    params = json.loads(json.dumps(to_kv_transfer_params(signed, "request", 2)))
    received = from_kv_transfer_params(params)
    assert received == signed
    verify_handoff(received, SECRET)


def test_the_shape_is_nixls():
    before = time.time()
    params = to_kv_transfer_params(PLAIN, "cmpl-1", 4)
    expiry = params.pop("remote_blocks_expiry_time")
    assert before + 30 <= expiry <= time.time() + 30
    del params[HANDOFF_KEY]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3], [0, 0, 9]],
        "remote_engine_id": "engine",
        "remote_request_id": "cmpl-1",
        "remote_host": "::1",
        "remote_port": 4711,
        "tp_size": 4,
        "remote_num_tokens": 70,
    }


def test_the_unsigned_keys_beside_the_handoff_are_never_believed():
    params = params_of() | {"remote_host": "attacker.example", "remote_port": 1, "remote_block_ids": [[7]]}
    handoff = from_kv_transfer_params(params)
    assert (handoff.host, handoff.port, handoff.block_ids) == ("::1", 4711, PLAIN.block_ids)


@pytest.mark.parametrize("params", [{}, {HANDOFF_KEY: None}, {"do_remote_prefill": True, "remote_host": "x"}])
def test_params_without_a_handoff_give_none(params):
    assert from_kv_transfer_params(params) is None


@pytest.mark.parametrize("value", ["x", 1, True, [], [1], b"x"])
def test_a_handoff_that_is_no_object_is_refused(value):
    with pytest.raises(PDHandoffError, match="pd_handoff"):
        from_kv_transfer_params({HANDOFF_KEY: value})


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_field_is_named(field):
    params = params_of()
    del params[HANDOFF_KEY][field]
    with pytest.raises(PDHandoffError, match=field):
        from_kv_transfer_params(params)


WRONG = [
    ("transfer_id", ""),
    ("transfer_id", "x" * 600),
    ("transfer_id", 5),
    ("host", ""),
    ("host", None),
    ("port", 0),
    ("port", 65536),
    ("port", -1),
    ("port", "4711"),
    ("port", 4711.5),
    ("port", True),
    ("num_tokens", 0),
    ("num_tokens", MAX_INT + 1),
    ("num_tokens", 10**30),
    ("lease_ms", 0),
    ("prompt_digest", "abc"),
    ("prompt_digest", ""),
    ("signature", "abc"),
    ("signature", 1),
    ("block_ids", []),
    ("block_ids", "123"),
    ("block_ids", [1, 2]),
    ("block_ids", [["1"]]),
    ("block_ids", [[1.5]]),
    ("block_ids", [[-1]]),
    ("block_ids", [[1], [3, MAX_INT + 1]]),
    ("block_ids", [[10**30]]),
    ("block_ids", {"0": [1]}),
    ("block_ids", [[1]] * (MAX_GROUPS + 1)),
    ("block_ids", [[1] * MAX_BLOCK_IDS, [1]]),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{f}-{str(v)[:12]}" for f, v in WRONG])
def test_a_wrong_value_is_refused_by_field(field, value):
    with pytest.raises(PDHandoffError, match=f"{HANDOFF_KEY}.*{field}") as caught:
        from_kv_transfer_params(params_of(**{field: value}))
    assert len(str(caught.value)) < 400, "a message must not carry what a client sends"
    assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(FIELDS)), inner, max_size=12)
        ),
        max_leaves=20,
    )
)
def test_any_json_is_a_handoff_none_or_a_typed_error(value):
    try:
        handoff = from_kv_transfer_params({HANDOFF_KEY: value})
    except PDHandoffError:
        return
    assert handoff is None or isinstance(handoff, Handoff)


def test_the_largest_handoff_fits_a_control_frame():
    big = msgspec.structs.replace(
        PLAIN,
        block_ids=((MAX_INT,) * MAX_BLOCK_IDS,),
        **{name: "x" * 512 for name in ("transfer_id", "lease_id", "engine_id", "epoch", "host", "layout")},
    )
    big = sign_handoff(big, SECRET)
    assert from_kv_transfer_params(to_kv_transfer_params(big, "r", 1)) == big
    message = DeliverHandoff(request_id="r", handoff=big, deadline_ms=1)
    assert len(msgspec.msgpack.encode(message)) <= MAX_FRAME_BYTES
