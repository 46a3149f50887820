# SPDX-License-Identifier: Apache-2.0
"""Staged transfers: extract into a contiguous buffer, one large pull, inject. For wires that hate small pieces."""
