"""Builders of modules like those that a user has, by copies of their layers, and the import names of builders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.errors import OptionError
from ..core.kinds import CLASSIFIER, CVAE, STATISTICS, SUFFIXES
from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from ..method import ModelBuilder

# How an architecture of each kind is called, see :mod:`.core.kinds`.
_NAMES = {
    CLASSIFIER: "{}", CVAE: "cvae-decoder", STATISTICS: "statistics",
    **{kind: "{}" + suffix for kind, suffix in SUFFIXES.items()},
}  # fmt: skip


def copies_of(named: Mapping[str, Any], kind: str) -> dict[str, ModelBuilder]:
    """Return builders that copy the modules' layers, one per architecture.

    Raises:
        OptionError: A model is no module, or a layer of it cannot be drawn anew.
    """
    found: dict[tuple[type, str], str] = {}
    builders: dict[str, ModelBuilder] = {}
    for client, module in named.items():
        if not isinstance(module, nn.Module):
            raise OptionError(
                f"model {client!r} is {type(module).__name__}: needs model=, a callable that returns its nn.Module"
            )
        key = (type(module), repr(module))
        if key not in found:
            own = _NAMES[kind].format(type(module).__name__)
            found[key] = (
                own if own not in builders else _NAMES[kind].format(f"{type(module).__name__}-{len(found) + 1}")
            )
            builders[found[key]] = partial(_fresh, copy.deepcopy(module).cpu())
    return builders


def maker_of(builder: ModelBuilder) -> str:
    """Return the import name of a builder, or of the class that makes the modules it copies; empty if it has none."""
    if not (isinstance(builder, partial) and builder.func is _fresh):
        return _import_name(builder)
    template = builder.args[0]
    try:
        with seeded_torch(0):
            same = repr(type(template)()) == repr(template)
    except TypeError:  # it needs arguments, which only the caller knows
        return ""
    return _import_name(type(template)) if same else ""


def _fresh(template: nn.Module) -> nn.Module:
    """Return a copy of a module whose weights are drawn anew."""
    module = copy.deepcopy(template).train().requires_grad_(True)
    for name, layer in module.named_modules():
        draw = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
        if draw is not None:
            draw()
        elif any(True for _ in layer.parameters(recurse=False)):
            raise OptionError(
                f"layer {name or 'at the top'!r} ({type(layer).__name__}) has no reset_parameters: needs model=, a "
                "callable that returns a fresh nn.Module"
            )
    return module


def _import_name(builder: Callable[..., Any]) -> str:
    module, name = getattr(builder, "__module__", ""), getattr(builder, "__qualname__", "")
    return f"{module}:{name}" if module not in ("", "__main__") and name and "<" not in name else ""
