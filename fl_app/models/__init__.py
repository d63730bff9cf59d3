"""The model zoo: the classifiers of the one-shot papers, built by name; and the user's own, code or a folder.

Most map normalised images [B, channels, H, W] to logits [B, C]. Others map rows of features [B, F, 1, 1] or texts of L
tokens [B, 1, 1, L]. The last layer of each is linear.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fl_app.project import FAILURES, called, function_of, one_line
from strategies.core.errors import OptionError
from strategies.core.facts import STATISTICS, Normalization, backbone_in, is_head, kind_of, run_on_blanks
from strategies.core.options import OWN_FORM, is_own
from strategies.core.seeds import seeded_torch

from . import huggingface

__all__ = ["ARCHITECTURES", "OwnArchitecture", "build", "builders", "chain", "is_users", "known_name", "penultimate"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class _Examples:
    """The examples that an architecture takes."""

    what: str
    fit: Callable[[int, int, int], bool]


def _images(min_side: int) -> _Examples:
    """Return square images with sides of at least ``min_side`` pixels, the smallest with non-empty feature maps."""
    return _Examples(
        f"(channels, height, width) with 1 or 3 channels, height = width, and at least {min_side} pixels a side",
        lambda channels, height, width: channels in (1, 3) and height == width >= min_side,
    )


_ROWS = _Examples("rows, (features, 1, 1)", lambda features, height, width: features > 0 and height == width == 1)
_TEXTS = _Examples("texts, (1, 1, tokens)", lambda channels, height, tokens: channels == height == 1 and tokens > 0)


@dataclass(frozen=True)
class _Architecture:
    """The module and the function of an architecture, and the examples that it takes."""

    module: str  # imported when first built: torchvision takes a second, and the small nets do not need it
    function: str
    takes: _Examples
    classes: int = 0  # the only possible number of classes; 0: any number
    how: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the function

    def fits(self, num_classes: int, shape: Shape) -> bool:
        """Return whether it takes examples of this shape and this number of classes."""
        return len(shape) == 3 and self.takes.fit(*shape) and self.classes in (0, num_classes)


_ZOO = {
    "lenet5": _Architecture("small_nets", "lenet5", _images(4)),
    "cnn5": _Architecture("small_nets", "cnn5", _images(18)),
    "cnn5-wide": _Architecture("small_nets", "cnn5", _images(18), how={"widths": (256, 256, 128)}),
    "mnist-cnn": _Architecture("small_nets", "mnist_cnn", _images(4)),
    "cnn1": _Architecture("small_nets", "cnn1", _images(18)),
    "cnn-torch": _Architecture("small_nets", "lenet5", _images(16), how={"padded": False}),
    "resnet18": _Architecture("torchvision_nets", "resnet", _images(8), how={"depth": 18}),
    "resnet18-narrow": _Architecture("torchvision_nets", "resnet18_narrow", _images(8)),
    "resnet34": _Architecture("torchvision_nets", "resnet", _images(8), how={"depth": 34}),
    "resnet18-imagenet": _Architecture("torchvision_nets", "resnet", _images(8), how={"depth": 18, "imagenet": True}),
    "resnet34-imagenet": _Architecture("torchvision_nets", "resnet", _images(8), how={"depth": 34, "imagenet": True}),
    "wrn16-1": _Architecture("torchvision_nets", "wide_resnet", _images(8), how={"depth": 16}),
    "wrn40-1": _Architecture("torchvision_nets", "wide_resnet", _images(8), how={"depth": 40}),
    "vgg11": _Architecture("torchvision_nets", "vgg11", _images(8)),
    "mobilenet": _Architecture("torchvision_nets", "mobilenet", _images(8)),
    "shufflenet": _Architecture("torchvision_nets", "shufflenet", _images(8)),
    "resnet8": _Architecture("torchvision_nets", "resnet8", _images(8)),
    "resnet8-ds": _Architecture("torchvision_nets", "resnet8", _images(8), how={"widths": (28, 56, 112)}),
    "logistic": _Architecture("small_nets", "logistic", _ROWS, classes=2),
    "mlp": _Architecture("small_nets", "mlp", _ROWS),
    "text-bag": _Architecture("wordllama", "text_bag", _TEXTS),
}

ARCHITECTURES: tuple[str, ...] = tuple(_ZOO)
_SMALLEST = 4  # pixels a side
HEAD_FORM = "head+<backbone>"
USERS_FORM = f"hf:<folder> of Hugging Face, or {OWN_FORM}"


def is_users(name: str) -> bool:
    """Return whether a name is that of the user's own model: ``module:attribute``, ``hf:<folder>``, or ``minilm``."""
    return is_own(name) or huggingface.is_folder(name)


def known_name(name: str, *, sums: bool = False) -> bool:
    """Say whether a name has the form of an architecture: of the zoo, of the user's own, or a head on a backbone.

    Args:
        name: Of a client's or the server's architecture. Whether code or a backbone exists shows when it is built.
        sums: Whether sums of features in place of a model count too: ``statistics``, ``statistics+<backbone>``.
    """
    if is_head(name) or (sums and kind_of(name) == STATISTICS):
        return name == STATISTICS or bool(backbone_in(name))
    return name in ARCHITECTURES or is_users(name)


def build(
    name: str, *, num_classes: int, input_shape: Shape, normalization: tuple[Any, Any] | None = None
) -> nn.Module:
    """Build a model; its weights are drawn from torch's global generator, or are those of a folder.

    Args:
        name: One of :data:`ARCHITECTURES`, ``package.module:attribute`` of the user's own code, see
            :class:`OwnArchitecture`, or ``hf:<folder>``, see :func:`.huggingface.classifier`.
        input_shape: (channels, height, width) of one image: 1 or 3 channels, square; (F, 1, 1) of a row, (1, 1, L) of
            a text.
        normalization: Mean and deviation of the pixels per channel, which a folder's model exchanges for its own; None
            for 0.5.

    Returns:
        A module in training mode: examples [B, *input_shape] -> logits [B, C].

    Raises:
        OptionError: The name is unknown, or the architecture does not fit the examples' shape or number of classes.
    """
    if is_users(name):
        return _own(name, num_classes, input_shape, normalization)()
    if name not in _ZOO:
        raise OptionError(f"unknown architecture {name!r}: must be one of {', '.join(ARCHITECTURES)}")
    architecture = _ZOO[name]
    _check_classes(f"architecture {name!r}", num_classes, architecture.classes)
    if not architecture.fits(num_classes, input_shape):
        raise OptionError(
            f"architecture {name!r} cannot take examples of shape {tuple(input_shape)}: must be "
            f"{architecture.takes.what}"
        )
    function = getattr(importlib.import_module(f".{architecture.module}", __package__), architecture.function)
    model: nn.Module = function(num_classes, tuple(input_shape), **architecture.how)
    return model


def builders(
    num_classes: int,
    input_shape: Shape,
    own: Iterable[str] = (),
    normalization: tuple[Any, Any] | None = None,
    *,
    logits: bool = True,
) -> dict[str, Callable[[], nn.Module]]:
    """Return a picklable builder of every architecture that fits these examples, by name.

    Args:
        input_shape: As in :func:`build`.
        normalization: As in :func:`build`.
        logits: Whether the outputs of the user's own must be logits.

    Raises:
        OptionError: No architecture fits the examples' shape or number of classes, or one of the user's own is wrong.
    """
    _check_classes("the model zoo", num_classes)
    found: dict[str, Callable[[], nn.Module]] = {
        name: partial(build, name, num_classes=num_classes, input_shape=input_shape)
        for name, architecture in _ZOO.items()
        if architecture.fits(num_classes, input_shape)
    }
    for name in dict.fromkeys(own):
        found[name] = made = _own(name, num_classes, input_shape, normalization)
        made.check(logits=logits)
    if not found:
        allowed = "; ".join(examples.what for examples in (_images(_SMALLEST), _ROWS, _TEXTS))
        raise OptionError(f"the model zoo cannot take examples of shape {tuple(input_shape)}: must be {allowed}")
    return found


def penultimate(model: nn.Module) -> nn.Linear:
    """Return the model's last linear layer: hook its input [B, F] for the penultimate features.

    The papers call that input the feature. For ``lenet5`` they mean the vector of 120 one layer earlier instead, the
    input of ``model.fc2``.

    Raises:
        OptionError: The model has no linear layer.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise OptionError(f"model {type(model).__name__} has no linear layer: penultimate features need one")
    return linear[-1]


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return the layers one after another; their names become the prefixes of the state_dict's keys."""
    return nn.Sequential(OrderedDict(layers))


@dataclass(frozen=True)
class OwnArchitecture:
    """A builder of a user's model, which travels with the user's function.

    Attributes:
        function: Takes ``num_classes`` and ``input_shape``, those that its signature names, and returns an nn.Module
            from normalised examples [B, *input_shape] to logits [B, C].
    """

    name: str
    function: Callable[..., Any]
    num_classes: int
    input_shape: Shape

    @property
    def means_of_examples(self) -> bool:
        """Whether the weights are means over a client's examples, which only an average by their numbers merges.

        It is a class attribute of such a module.
        """
        return bool(getattr(self.function, "means_of_examples", False))

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

    def check(self, *, logits: bool = True) -> None:
        """Build one model, and pass two examples through it if its outputs must be logits.

        Raises:
            OptionError: It does not take the examples, or its outputs are not C float32 logits for each.
        """
        what = f"architecture {self.name!r}"
        with seeded_torch(0, "check"), torch.no_grad():
            model = self().eval()
            if not logits:
                return
            try:
                found = run_on_blanks(model, self.input_shape)
            except FAILURES as error:
                reason = one_line(error)
                raise OptionError(f"{what} does not take examples of shape {self.input_shape}: {reason}") from error
        if not isinstance(found, torch.Tensor):
            raise OptionError(f"{what} maps examples to {type(found).__name__}: must map them to one tensor of logits")
        if tuple(found.shape) != (2, self.num_classes) or found.dtype != torch.float32:
            raise OptionError(
                f"{what} maps 2 examples of shape {self.input_shape} to "
                f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}: must be "
                f"float32 [2, {self.num_classes}], one logit per class"
            )


def _own(name: str, num_classes: int, input_shape: Shape, normalization: tuple[Any, Any] | None) -> OwnArchitecture:
    if huggingface.is_folder(name):
        pixels = None if normalization is None else Normalization(*normalization)
        function: Callable[..., Any] = partial(huggingface.classifier, name, pixels)
    else:
        function = function_of(name, "architecture")
    return OwnArchitecture(name, function, num_classes, (*input_shape,))


def _check_classes(who: str, num_classes: int, only: int = 0) -> None:
    if num_classes < 1 or num_classes != (only or num_classes):
        raise OptionError(f"{who} cannot tell {num_classes} classes apart: must be {only or 'at least 1'}")
