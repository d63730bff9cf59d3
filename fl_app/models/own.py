"""Architectures of the user's own code, named ``package.module:attribute``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_app.project import FAILURES, called, function_of, one_line
from strategies.core.errors import OptionError
from strategies.core.facts import run_on_blanks
from strategies.core.seeds import seeded_torch

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class OwnArchitecture:
    """A builder of a user's model, which travels with the user's function.

    Attributes:
        name: Its name, ``package.module:attribute``.
        function: Takes ``num_classes`` and ``input_shape``, those that its signature names, and returns an nn.Module
            from normalised examples [B, *input_shape] to logits [B, C].
        num_classes: C.
        input_shape: As in :func:`fl_app.models.build`.
    """

    name: str
    function: Callable[..., Any]
    num_classes: int
    input_shape: Shape

    def __call__(self) -> nn.Module:
        """Return a new model; its weights are drawn from torch's global generator.

        Raises:
            OptionError: The function fails, or returns something else.
        """
        what = f"architecture {self.name!r}"
        given = {"num_classes": self.num_classes, "input_shape": self.input_shape}
        found = called(self.function, given, what)
        if not isinstance(found, nn.Module):
            raise OptionError(f"{what} returns {type(found).__name__}: must return an nn.Module")
        return found

    def check(self) -> None:
        """Build one model, and pass two examples through it.

        Raises:
            OptionError: It does not take the examples, or its outputs are not C float32 logits for each.
        """
        what = f"architecture {self.name!r}"
        with seeded_torch(0, "check"), torch.no_grad():
            model = self().eval()
            try:
                found = run_on_blanks(model, self.input_shape)
            except FAILURES as error:
                reason = one_line(error)
                raise OptionError(f"{what} does not take examples of shape {self.input_shape}: {reason}") from error
        if not isinstance(found, torch.Tensor):
            raise OptionError(f"{what} maps examples to {type(found).__name__}: must map them to one tensor of logits")
        if tuple(found.shape) != (2, self.num_classes) or found.dtype != torch.float32:
            raise OptionError(
                f"{what} maps 2 examples of shape {self.input_shape} to {_kind(found)} {list(found.shape)}: must be "
                f"float32 [2, {self.num_classes}], one logit per class"
            )


def own_architecture(name: str, num_classes: int, input_shape: Shape) -> OwnArchitecture:
    """Return the builder of a user's architecture.

    Raises:
        OptionError: It cannot be imported; see :func:`fl_app.project.imported`.
    """
    return OwnArchitecture(name, function_of(name, "architecture"), num_classes, (*input_shape,))


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
