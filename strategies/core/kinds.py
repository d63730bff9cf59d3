"""The kinds of uploads: a classifier, one with a class "unknown", the decoder of a CVAE, or sums of features.

The name of its architecture says it; a method works on uploads of one kind, :attr:`.method.Method.uploads`.
"""

from __future__ import annotations

CLASSIFIER = "classifier"
OPEN_SET = "open-set"
CVAE = "cvae"
STATISTICS = "statistics"
# The second moments of sums of features: Gram matrices, sums of squares per class, or both.
GRAM, SQUARES = "gram", "squares"
# The kinds that answer an example with logits, and so have an accuracy of their own.
PREDICTING = (CLASSIFIER, OPEN_SET)


def kind_of(architecture: str) -> str:
    """Return the kind of an architecture: ``net+unknown``, ``cvae-decoder``, ``statistics``, or any classifier."""
    if architecture.endswith("+unknown"):
        return OPEN_SET
    return {"cvae-decoder": CVAE, "statistics": STATISTICS}.get(architecture, CLASSIFIER)


def holds_images(input_shape: tuple[int, int, int]) -> bool:
    """Say whether examples of this shape are images; rows of features are (F, 1, 1), texts of L tokens (1, 1, L)."""
    return input_shape[1] > 1
