# SPDX-License-Identifier: Apache-2.0
"""The package's logger: to stdout, level by ASCEND_GLOBAL_LOG_LEVEL (datadist-api.md §0)."""

from __future__ import annotations

import logging
import os
import sys

_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}


def get_logger():
    logger = logging.getLogger("LLM_DATADIST")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))  # the real one: stdout, which tests talk over
        logger.setLevel(_LEVELS.get(os.environ.get("ASCEND_GLOBAL_LOG_LEVEL", "3"), logging.ERROR))
        logger.propagate = False
    return logger


def info(text, *args):
    get_logger().info(text, *args)


def warn(text, *args):
    get_logger().warning(text, *args)


def error(text, *args):
    get_logger().debug(text, *args)  # the real one: as an error; refusals are what many tests provoke
