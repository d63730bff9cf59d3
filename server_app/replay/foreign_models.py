"""The models of another project, built by that project's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fl_app.project import imported
from strategies.core.errors import OptionError


def foreign_models(text: str, student: str) -> dict[str, Callable[[], Any]]:
    """Import the models' builder: one callable for all, or a dict of architecture name -> callable.

    Args:
        text: ``module:attribute``; the module may lie in the current folder.
        student: The architecture of the result; a single callable builds this one.

    Raises:
        OptionError: The import fails, or the attribute is neither of the two.
    """
    found = imported(text, "--model")
    models = dict(found) if isinstance(found, Mapping) else {student: found}
    if student not in models or not all(map(callable, models.values())):
        raise OptionError(
            f"--model {text!r} is {type(found).__name__}: must be a callable that returns an nn.Module, "
            f"or a dict of architecture name -> callable with {student!r} among them"
        )
    return models
