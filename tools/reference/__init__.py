# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/`, written from the code: flags, variables, metrics, endpoints, errors, verbs, handshake fields.

Imports the modules that own the tables, or reads their syntax trees; never imports vLLM, so that a check takes seconds.
"""
