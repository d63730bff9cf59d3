"""The architectures that a run accepts, and those of one kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.errors import OptionError
from ..core.kinds import CLASSIFIER, STATISTICS, base_of, kind_of
from ..core.options import listed

if TYPE_CHECKING:
    from ..method import ModelBuilder


def of_kind(builders: Mapping[str, ModelBuilder], kind: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a client may send; all of them where no name says that it is of this kind.

    Sums of features join an ensemble of classifiers as heads.
    """
    kinds = (kind, STATISTICS) if kind == CLASSIFIER else (kind,)
    return {name: builder for name, builder in builders.items() if kind_of(name) in kinds} or builders


def accepted_of(builders: Mapping[str, ModelBuilder], accepted: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a run accepts.

    Args:
        builders: The models that a client may send.
        accepted: Their names with commas between, without the suffix of a kind; empty for all of them.

    Raises:
        OptionError: A name is not one of them.
    """
    names = listed(accepted)
    bases = {name: base_of(name) for name in builders}
    if unknown := sorted(set(names) - set(bases.values())):
        raise OptionError(f"accepted names {', '.join(unknown)}: must be of {', '.join(sorted(bases.values()))}")
    return {name: builders[name] for name, base in bases.items() if base in names} if names else builders
