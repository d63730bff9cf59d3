"""The model zoo: the image classifiers of the one-shot papers, built by name.

Every model maps images [B, channels, H, W], normalised, to logits [B, C], and ends in one linear layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from strategies.errors import OptionError

__all__ = ["ARCHITECTURES", "build", "builders", "penultimate"]


@dataclass(frozen=True)
class _Architecture:
    """Where an architecture's function is, and the smallest side of an image whose maps stay non-empty."""

    module: str  # imported when first built: torchvision takes a second, and the small nets do without it
    function: str
    min_side: int


_ZOO = {
    "lenet5": _Architecture("lenet", "lenet5", 4),
    "cnn5": _Architecture("cnn", "cnn5", 18),
    "cnn5-wide": _Architecture("cnn", "cnn5_wide", 18),
    "mnist-cnn": _Architecture("cnn", "mnist_cnn", 4),
    "cnn1": _Architecture("cnn", "cnn1", 18),
    "cnn-torch": _Architecture("lenet", "cnn_torch", 16),
    "resnet18": _Architecture("resnet", "resnet18", 8),
    "resnet34": _Architecture("resnet", "resnet34", 8),
    "resnet18-imagenet": _Architecture("resnet", "resnet18_imagenet", 8),
    "resnet34-imagenet": _Architecture("resnet", "resnet34_imagenet", 8),
    "wrn16-1": _Architecture("wide_resnet", "wrn16_1", 8),
    "wrn40-1": _Architecture("wide_resnet", "wrn40_1", 8),
    "vgg11": _Architecture("vgg", "vgg11", 8),
    "mobilenet": _Architecture("mobile", "mobilenet", 8),
    "shufflenet": _Architecture("mobile", "shufflenet", 8),
    "resnet8": _Architecture("resnet", "resnet8", 8),
    "resnet8-ds": _Architecture("resnet", "resnet8_ds", 8),
}

ARCHITECTURES: tuple[str, ...] = tuple(_ZOO)


def build(name: str, *, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build an untrained model; its weights are drawn from torch's global state, as every module's are.

    Args:
        name: One of :data:`ARCHITECTURES`.
        num_classes: C, at least 1.
        input_shape: (channels, height, width) of one image: 1 or 3 channels, square.

    Returns:
        A module in training mode: images [B, channels, H, W] -> logits [B, C].

    Raises:
        OptionError: The name is unknown, or the architecture cannot take such images or so many classes.
    """
    if name not in _ZOO:
        raise OptionError(f"unknown architecture {name!r}: known are {', '.join(ARCHITECTURES)}")
    architecture = _ZOO[name]
    _check(f"architecture {name!r}", num_classes, input_shape, architecture.min_side)
    function = getattr(importlib.import_module(f".{architecture.module}", __package__), architecture.function)
    model: nn.Module = function(num_classes, tuple(input_shape))
    return model


def builders(num_classes: int, input_shape: tuple[int, int, int]) -> dict[str, Callable[[], nn.Module]]:
    """Return a builder, which pickles, of every architecture that takes such images, by name.

    Args:
        num_classes: C, at least 1.
        input_shape: (channels, height, width) of one image: 1 or 3 channels, square.

    Raises:
        OptionError: No architecture can take such images or so many classes.
    """
    _check("the model zoo", num_classes, input_shape, min(entry.min_side for entry in _ZOO.values()))
    return {
        name: partial(build, name, num_classes=num_classes, input_shape=input_shape)
        for name, architecture in _ZOO.items()
        if input_shape[1] >= architecture.min_side
    }


def penultimate(model: nn.Module) -> nn.Linear:
    """Return the model's last linear layer: hook its input [B, F] for the penultimate features.

    That input is what the papers call the feature, except that for ``lenet5`` they mean the vector of 120 one
    layer earlier, the input of ``model.fc2``.

    Raises:
        OptionError: The model has no linear layer.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise OptionError(f"model {type(model).__name__} has no linear layer: penultimate features need one")
    return linear[-1]


def _check(who: str, num_classes: int, input_shape: tuple[int, int, int], min_side: int) -> None:
    shape = tuple(input_shape)
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2] or shape[1] < min_side:
        raise OptionError(
            f"{who} cannot take images of shape {shape}: allowed is (channels, height, width) with 1 or 3 channels, "
            f"height = width, and at least {min_side} pixels a side"
        )
    if num_classes < 1:
        raise OptionError(f"{who} cannot tell {num_classes} classes apart: allowed is at least 1")
