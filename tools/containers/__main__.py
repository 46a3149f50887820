# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.containers build TARGET`: one stage, to look at its layers."""

from __future__ import annotations

import sys

from tools.containers import dockerfile, images, roots


def main() -> int:
    stages = dockerfile.read(images.ROOT / "Dockerfile")
    base = images.Image((roots.get_base(),), "base")
    builder = images.Builder(stages, images.Site.of_this_machine(), bases={"debian:bookworm-slim": base})
    image = builder.build(sys.argv[2])
    print(image)
    for line in builder.timings:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
