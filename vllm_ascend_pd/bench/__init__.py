# SPDX-License-Identifier: Apache-2.0
"""The benches of `vllm pd bench`: `transfer` (two processes, against peers) and `stages` (one process, against torch).

Each prints a table and can write every sample as JSON and a chart; docs/performance.md says how to read them.
`transfer/worker.py` and what it imports need the standard library only: they also run in the peers' environment.
"""
