"""Building blocks of several architectures: a named chain of layers, and two laws of initialisation."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return the layers one after another; their names become the prefixes of the state_dict's keys."""
    return nn.Sequential(OrderedDict(layers))


def default_init(model: nn.Module) -> nn.Module:
    """Draw every parameter again from torch's default law, in place, and return the model.

    It replaces the initialisation of torchvision's models.
    """
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def he_normal_convolutions(model: nn.Module) -> nn.Module:
    """Draw every convolution from N(0, 2 / (k * k * out)), biases 0, in place, and return the model.

    He et al., Delving Deep into Rectifiers, ICCV 2015, Eq. (14): the variance that keeps the gradients' size.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
