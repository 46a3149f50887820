# SPDX-License-Identifier: Apache-2.0
"""`vllm pd doctor`: what is checked on one host and towards a peer, and how it is told."""
