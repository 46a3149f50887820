# SPDX-License-Identifier: Apache-2.0
"""Programs that build, check and serve this repository; none of them ships in the wheel."""
