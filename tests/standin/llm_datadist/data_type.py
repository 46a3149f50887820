# SPDX-License-Identifier: Apache-2.0
"""Element types; numpy's are looked up when asked for (datadist-api.md §3)."""

from __future__ import annotations

from enum import Enum

from llm_datadist import metadef_wrapper as _values

# name -> bytes, numpy's name
_KINDS = {
    "DT_FLOAT": (4, "float32"),
    "DT_FLOAT16": (2, "float16"),
    "DT_INT8": (1, "int8"),
    "DT_INT32": (4, "int32"),
    "DT_UINT8": (1, "uint8"),
    "DT_INT16": (2, "int16"),
    "DT_UINT16": (2, "uint16"),
    "DT_UINT32": (4, "uint32"),
    "DT_INT64": (8, "int64"),
    "DT_UINT64": (8, "uint64"),
    "DT_DOUBLE": (8, "float64"),
    "DT_BOOL": (1, "bool"),
    "DT_STRING": (16, "bytes_"),
    "DT_BF16": (2, "float16"),
}
DataType = Enum("DataType", {name: getattr(_values, name) for name in _KINDS}, module=__name__)
python_dtype_2_dwrapper_dtype = {DataType[name]: getattr(_values, name) for name in _KINDS}
_BYTES = {DataType[name]: size for name, (size, _) in _KINDS.items()}


def get_python_dtype_from_wrapper_dtype(value):
    return DataType(value)


def __getattr__(name):
    if name not in ("dtype_to_np_dtype", "np_dtype_to_dtype", "valid_np_dtypes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy

    forward = {DataType[kind]: getattr(numpy, numpy_name) for kind, (_, numpy_name) in _KINDS.items()}
    back = {kind: data_type for data_type, kind in forward.items() if data_type is not DataType.DT_BF16}
    return {"dtype_to_np_dtype": forward, "np_dtype_to_dtype": back, "valid_np_dtypes": tuple(back)}[name]
