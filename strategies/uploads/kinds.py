"""The kinds of uploads: a classifier, one with a class "unknown", the decoder of a CVAE, or sums of features.

The name of its architecture says it; a method works on uploads of one kind, :attr:`.method.Method.uploads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.errors import OptionError

if TYPE_CHECKING:
    from ..method import ModelBuilder

CLASSIFIER = "classifier"
OPEN_SET = "open-set"
CVAE = "cvae"
STATISTICS = "statistics"
# The kinds that answer an example with logits, and so have an accuracy of their own.
PREDICTING = (CLASSIFIER, OPEN_SET)


def kind_of(architecture: str) -> str:
    """Return the kind of an architecture: ``net+unknown``, ``cvae-decoder``, ``statistics``, or any classifier."""
    if architecture.endswith("+unknown"):
        return OPEN_SET
    return {"cvae-decoder": CVAE, "statistics": STATISTICS}.get(architecture, CLASSIFIER)


def of_kind(builders: Mapping[str, ModelBuilder], kind: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a client may send; all of them where no name says that it is of this kind."""
    return {name: builder for name, builder in builders.items() if kind_of(name) == kind} or builders


def accepted_of(builders: Mapping[str, ModelBuilder], accepted: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a run accepts.

    Args:
        builders: The models that a client may send.
        accepted: Their names with commas between, without the suffix of a kind; empty for all of them.

    Raises:
        OptionError: A name is not one of them.
    """
    names = [name.strip() for name in accepted.split(",") if name.strip()]
    bases = {name: name.removesuffix("+unknown") for name in builders}
    if unknown := sorted(set(names) - set(bases.values())):
        raise OptionError(f"accepted names {', '.join(unknown)}: must be of {', '.join(sorted(bases.values()))}")
    return {name: builders[name] for name, base in bases.items() if base in names} if names else builders
