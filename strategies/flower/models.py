"""The models that a user hands to a strategy: one callable, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import OptionError

if TYPE_CHECKING:
    from ..method import ModelBuilder

    Model = ModelBuilder | Mapping[str, ModelBuilder]


def named_builders(model: Model) -> dict[str, ModelBuilder]:
    """Return the models by name; a single one is called ``"model"``.

    Raises:
        OptionError: There is none.
    """
    if callable(model):
        return {"model": model}
    if not model:
        raise OptionError("model is an empty dict: allowed is a callable, or a dict of architecture name -> callable")
    return dict(model)


def chosen_student(student: str | None, builders: Mapping[str, ModelBuilder]) -> str:
    """Return the architecture of the result; with one model there is nothing to choose.

    Raises:
        OptionError: It is missing or unknown.
    """
    if student is None and len(builders) == 1:
        return next(iter(builders))
    if student is None or student not in builders:
        raise OptionError(f"student is {student!r}: allowed is one of {', '.join(builders)}")
    return student
