# SPDX-License-Identifier: Apache-2.0
"""Build and run the NPU data path without an NPU: its environment, the stand-in, the extension, the tests."""
