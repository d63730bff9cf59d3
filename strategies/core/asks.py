"""The requests of a method to its clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientAsks:
    """The requests of a method to its clients beside the upload, whose kind is ``Method.uploads``.

    Attributes:
        holdout: Share of its examples that a client keeps from training; 0: none.
        holdout_per_class: Keep the share of every class, not of all examples at random.
        calibrate: A client sends the ranges of its layers' outputs, so that the server can quantise its model.
    """

    holdout: float = 0.0
    holdout_per_class: bool = False
    calibrate: bool = False
