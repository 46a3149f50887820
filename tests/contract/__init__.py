# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: one test or more for each rule of docs/datadist.md."""
