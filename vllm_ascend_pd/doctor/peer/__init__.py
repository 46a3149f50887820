# SPDX-License-Identifier: Apache-2.0
"""Between two hosts: a doctor that listens, one that visits it, and what they do together. A running instance, too."""
