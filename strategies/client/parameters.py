"""A model's trainable parameters by name, without buffers: the corrections of local training act on these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

State = dict[str, torch.Tensor]


def parameters_of(model: nn.Module) -> State:
    """Return copies of a model's trainable parameters by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def kept_or_zero(kept: Mapping[str, torch.Tensor], start: State) -> State:
    """Return a client's kept value of every parameter, or zeros if no kept value fits.

    Args:
        kept: Kept values by name of parameter; empty for none.
        start: The parameters.
    """
    if shapes_of(kept) == shapes_of(start):
        return beside(kept, start)
    return {name: torch.zeros_like(value) for name, value in start.items()}


def beside(state: Mapping[str, torch.Tensor], start: State) -> State:
    """Return a state on the devices of its parameters."""
    return {name: state[name].to(value.device) for name, value in start.items()}


def inner(model: nn.Module, other: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``<w, other>`` over all parameters w, a scalar; its gradient is ``other``."""
    return torch.stack([(value * other[name]).sum() for name, value in model.named_parameters()]).sum()


def squared_way(model: nn.Module, start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``||w - start||^2`` over all parameters w, a scalar."""
    return torch.stack([(value - start[name]).square().sum() for name, value in model.named_parameters()]).sum()


def part_of(kept: Mapping[str, torch.Tensor], prefix: str) -> State:
    """Return the entries whose names start with a prefix, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}


def arrays_of(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as numpy arrays."""
    return {name: value.cpu().numpy() for name, value in state.items()}


def shapes_of(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes, to compare two states."""
    return {name: tuple(value.shape) for name, value in state.items()}
