# SPDX-License-Identifier: Apache-2.0
"""`bench transfer`: 64 MiB in pieces between two processes, ours and peers, interleaved round by round."""
