"""The logits in what a model returns: a tensor, or an object that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Where models keep their logits: Hugging Face's under the first, torchvision's segmentation under the second.
LOGITS_NAMES = ("logits", "out", "output", "outputs", "pred", "preds", "prediction", "predictions")
LOGITS_RULE = (
    "must return logits: a tensor, an object or dict that has them as 'logits', or a tuple that begins with them"
)


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits in what a model returns for a batch.

    The rule, the first that holds:

    1. A tensor is the logits.
    2. A mapping's value, or an object's attribute, under the first of :data:`LOGITS_NAMES` that it has. So read are
       the outputs of Hugging Face, and of torchvision's GoogLeNet and Inception in training mode.
    3. A mapping's only value.
    4. The first item of a tuple or list; further items, such as auxiliary outputs, hidden states and losses, are left.

    The rule is applied again to what it finds. Nothing about the values is judged here, nor their shape.

    Raises:
        TypeError: The rule finds no tensor; says what was found, and :data:`LOGITS_RULE`.
    """
    found = output
    for _ in range(4):  # a limit, because a list may hold itself
        if isinstance(found, torch.Tensor):
            return found
        found = _inside(found)
    raise TypeError(f"returns {_kind(output)}: {LOGITS_RULE}")


def return_logits(module: nn.Module) -> nn.Module:
    """Make a module return :func:`logits_of` its output; its layers and the names of its weights stay.

    It is a forward hook, so that the module's class stays as well; a second call changes nothing.
    """
    if _read_output not in module._forward_hooks.values():
        module.register_forward_hook(_read_output)
    return module


def _read_output(module: nn.Module, _: Any, output: Any) -> torch.Tensor:
    try:
        return logits_of(output)
    except TypeError as error:
        raise TypeError(f"{type(module).__name__} {error}") from error


def _inside(found: Any) -> Any:
    """Return the part of an output that holds the logits; None if there is none."""
    if isinstance(found, Mapping):
        named = next((found[name] for name in LOGITS_NAMES if found.get(name) is not None), None)
        return next(iter(found.values())) if named is None and len(found) == 1 else named
    named = next((value for name in LOGITS_NAMES if (value := getattr(found, name, None)) is not None), None)
    if named is not None:
        return named
    return found[0] if isinstance(found, tuple | list) and found else None


def _kind(output: Any) -> str:
    """Return what an output is, with the names or kinds of what it holds."""
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"a {kind} of {', '.join(map(str, list(output)[:6])) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"a {kind} of {', '.join(type(item).__name__ for item in output[:6]) or 'nothing'}"
    return "nothing" if output is None else f"a {kind}"
