# SPDX-License-Identifier: Apache-2.0
"""The control plane: one server thread per engine core, and the clients that talk to it. No vLLM."""
