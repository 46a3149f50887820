# SPDX-License-Identifier: Apache-2.0
"""Builds and tries the Dockerfile's targets without Docker: same instructions, in a clean root, by chroot."""
