# SPDX-License-Identifier: Apache-2.0
"""Type checks: None passes unless forbidden, bool is an int (datadist-api.md §0)."""

from __future__ import annotations


def check_isinstance(name, value, classes, inner=None, allow_none=True):
    if value is None and allow_none:
        return
    kinds = tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)
    if not isinstance(value, kinds):
        raise TypeError(f"{name} only support {[kind.__name__ for kind in kinds]}, but got {type(value)}.")
    if inner is not None:
        check_inner(name, value, inner)


def check_inner(name, values, inner):
    kinds = tuple(inner) if isinstance(inner, (list, tuple)) else (inner,)
    for value in values:
        if not isinstance(value, kinds):
            raise TypeError(f"{name} inner type only support {[kind.__name__ for kind in kinds]}.")


def check_dict(name, values, key_kind, value_kind):
    check_isinstance(name, values, dict, allow_none=False)
    check_inner(name, values.keys(), key_kind)
    check_inner(name, values.values(), value_kind)


def _check_range(name, value, low, high, kind):
    if not isinstance(value, int):
        raise TypeError(f"{name} only support ['int'], but got {type(value)}.")
    if not low <= value <= high:
        raise ValueError(f"{name}'s value is out of range,{value} is not a {kind} value.")


def _unsigned(bits):
    return lambda name, value: _check_range(name, value, 0, 2**bits - 1, f"uint{bits}")


def _signed(bits):
    return lambda name, value: _check_range(name, value, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, f"int{bits}")


check_uint8, check_uint16, check_uint32, check_uint64 = map(_unsigned, (8, 16, 32, 64))
check_int32, check_int64 = map(_signed, (32, 64))


def _all(name, values, check):
    check_isinstance(name, values, (list, tuple), allow_none=False)
    for value in values:
        check(name, value)


def check_list_int32(name, values):
    _all(name, values, check_int32)


def check_list_int64(name, values):
    _all(name, values, check_int64)


def check_list_uint64(name, values):
    _all(name, values, check_uint64)


def check_positive_or_set_default(name, value, default):
    if value is None:
        return default
    _check_range(name, value, 1, 2**31 - 1, "int32")
    return value
