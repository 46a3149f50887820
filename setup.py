# SPDX-License-Identifier: Apache-2.0
"""The product is one wheel named `vllm`, made by `tools.fork`; this file only leads there.

`python setup.py bdist_wheel` makes it. `pip install .` cannot: the distribution that comes out is upstream's,
patched, with upstream's name, version and dependencies, and pip expects what pyproject.toml names.
"""

from __future__ import annotations

import subprocess
import sys

from setuptools import Command, setup  # type: ignore[import-untyped]


class BuildNative(Command):
    """`build_ext`: the host libraries into vllm_ascend_pd/native, by CMake and Ninja."""

    description = "build the host libraries of csrc_npu with CMake + Ninja and the pinned compiler"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        """Nothing to choose."""

    def finalize_options(self) -> None:
        """Nothing to derive."""

    def run(self) -> None:
        """Build."""
        subprocess.run([sys.executable, "-m", "tools.native", "build"], check=True)


class ForkWheel(Command):
    """`bdist_wheel`, by way of `python -m tools.fork wheel`; the libraries first."""

    description = "build the patched vLLM wheel of one lane"
    user_options = [("lane=", None, "lane of vllm/UPSTREAM.toml"), ("dist-dir=", "d", "output folder")]

    def initialize_options(self) -> None:
        """Defaults."""
        self.lane = "cpu"
        self.dist_dir = "dist"

    def finalize_options(self) -> None:
        """Nothing to derive."""

    def run(self) -> None:
        """Build."""
        self.run_command("build_ext")
        command = [sys.executable, "-m", "tools.fork", "wheel", "--lane", self.lane, "--out", self.dist_dir]
        subprocess.run(command, check=True)


class Refuse(Command):
    """What pip calls first."""

    user_options: list[tuple[str, str | None, str]] = [("output-dir=", "o", ""), ("keep-egg-info", None, "")]

    def initialize_options(self) -> None:
        """Nothing."""
        self.output_dir = self.keep_egg_info = None

    def finalize_options(self) -> None:
        """Nothing."""

    def run(self) -> None:
        """Say what to do instead."""
        sys.exit("not installable with `pip install .`: run `make build`, then `pip install dist/vllm-*.whl`")


COMMANDS = {"build_ext": BuildNative, "bdist_wheel": ForkWheel}
setup(cmdclass={**COMMANDS, "dist_info": Refuse, "develop": Refuse, "install": Refuse})
