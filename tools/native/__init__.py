# SPDX-License-Identifier: Apache-2.0
"""Builds, tests and examines the C++ of csrc_npu: `python -m tools.native VERB...`."""
