"""The kinds of uploads: a classifier, its first block, one with a class "unknown", an encoder, a decoder, or sums.

The name of its architecture says it; a method works on uploads of one kind, :attr:`.method.Method.uploads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .facts import Normalization

CLASSIFIER = "classifier"
OPEN_SET = "open-set"
PROTOTYPES = "prototypes"
BLOCK = "block"
CVAE = "cvae"
STATISTICS = "statistics"
HEAD = "head+"  # before the name of a backbone
# The second moments of sums of features: Gram matrices, sums of squares per class, or both.
GRAM, SQUARES = "gram", "squares"
# The kinds that answer an example with logits, and so have an accuracy of their own; others may follow the C logits.
PREDICTING = (CLASSIFIER, OPEN_SET, PROTOTYPES)
# The kinds whose architectures are classifiers' with a suffix.
SUFFIXES = {OPEN_SET: "+unknown", PROTOTYPES: "+prototypes", BLOCK: "+block"}
# What a model raises on examples that it does not take.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def kind_of(architecture: str) -> str:
    """Return the kind of an architecture: ``net+unknown``, ``cvae-decoder``, sums of features, or any classifier.

    Sums are ``statistics``, of the run's backbone, or ``statistics+<backbone>``.
    """
    for kind, suffix in SUFFIXES.items():
        if architecture.endswith(suffix):
            return kind
    if architecture.partition("+")[0] == STATISTICS:
        return STATISTICS
    return CVAE if architecture == "cvae-decoder" else CLASSIFIER


def is_head(architecture: str) -> bool:
    """Say whether an architecture is a head on a frozen backbone, ``head+<backbone>``: its images get no gradient."""
    return architecture.startswith(HEAD)


def backbone_in(architecture: str) -> str:
    """Return the backbone that the name of a head or of sums has; empty for that of the run."""
    return architecture.partition("+")[2] if is_head(architecture) or kind_of(architecture) == STATISTICS else ""


def base_of(architecture: str) -> str:
    """Return an architecture's name without the suffix of its kind: that of the classifier that it was made of."""
    return architecture.removesuffix(SUFFIXES.get(kind_of(architecture), ""))


def holds_images(input_shape: tuple[int, int, int]) -> bool:
    """Say whether examples of this shape are images; rows of features are (F, 1, 1), texts of L tokens (1, 1, L)."""
    return input_shape[1] > 1


def default_normalization(input_shape: tuple[int, int, int]) -> Normalization:
    """Return the input space where none is given: images from -1 to 1, rows and texts as they are stored."""
    channels = input_shape[0]
    return Normalization.half(channels) if holds_images(input_shape) else Normalization.identity(channels)


def tried(model: Callable[..., Any], input_shape: tuple[int, int, int]) -> Any:
    """Return what a model makes of two blank examples; texts that it refuses as floats are whole numbers.

    Raises:
        REFUSALS: It takes neither.
    """
    import torch

    blank = torch.zeros(2, *input_shape)
    try:
        return model(blank)
    except REFUSALS as error:
        if tuple(input_shape[:2]) != (1, 1):
            raise
        try:
            return model(blank.long())
        except REFUSALS as again:
            raise TypeError(f"{error}; as whole numbers: {again}") from again
