# SPDX-License-Identifier: Apache-2.0
"""Lowers the Triton kernels as far as is possible without CANN, and runs what comes out on this machine.

`python -m tools.npu_triton env|lower|object|test`.
"""
