"""What the examples are that a model takes, in words: for its card and its exported files."""

from __future__ import annotations

from strategies.core.facts import Normalization
from strategies.core.kinds import holds_images


def as_given(input_shape: tuple[int, int, int], normalization: Normalization | None) -> str:
    """Say how models take examples that nothing normalises; empty where images are normalised.

    Args:
        input_shape: Of one example.
        normalization: Of images; None for rows and texts.
    """
    if not holds_images(input_shape):
        return "as the data set gives them"
    same = normalization == Normalization.identity(input_shape[0])
    return "as the data set gives them, bytes divided by 255" if same else ""
