# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while the fork is built; each class says who has to act."""

from __future__ import annotations


class ForkError(Exception):
    """The verb stops here; the message says what to do. Exit code 1."""

    exit_code = 1


class EditInvalid(ForkError):
    """An edit file breaks the vocabulary; its author corrects the file."""


class AnchorLost(ForkError):
    """The premise of an edit no longer holds in this upstream release; a person must look."""


class ArtefactError(ForkError):
    """An upstream artefact is missing, cannot be fetched, or is not what its hash says."""
