# SPDX-License-Identifier: Apache-2.0
"""One module per contender with a class `Contender`; chosen by `specs.py`, run by `worker.py`."""
