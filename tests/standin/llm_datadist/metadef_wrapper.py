# SPDX-License-Identifier: Apache-2.0
"""The numbers of element types (an extension module in the real package)."""

DT_FLOAT, DT_FLOAT16, DT_INT8, DT_INT32, DT_UINT8 = 0, 1, 2, 3, 4
DT_INT16, DT_UINT16, DT_UINT32, DT_INT64, DT_UINT64 = 6, 7, 8, 9, 10
DT_DOUBLE, DT_BOOL, DT_STRING, DT_BF16 = 11, 12, 13, 27
