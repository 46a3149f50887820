# SPDX-License-Identifier: Apache-2.0
"""Checks of our delta against vllm-ascend's published sources: read as text and syntax trees, never imported.

`python -m tools.ascend --help` lists the verbs. vllm-ascend's sdist is only ever used after its hash was compared.
"""
