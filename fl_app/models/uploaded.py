"""Uploads beyond the zoo's classifiers: open-set ones, encoders with prototypes, first blocks, decoders, and sums.

A task names the model that the clients of a method train: ``"classifier"``, ``"open-set"``, ``"prototypes"``,
``"block"``, ``"cvae"`` or ``"statistics"``. The server and a replay read an upload's task from its architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from fl_app.models.client_nets import CUTS, Decoder, FirstBlock, PrototypeNet, cut
from strategies.core.errors import OptionError
from strategies.core.facts import SUFFIXES

from . import build, builders, is_users
from .feature_heads import feature_builders
from .features import FeatureFunction

DECODER = "cvae-decoder"
SUMS = "statistics"
LEAST_SIDE = 4  # pixels a side: the smallest image that destructive augmentation can swap and blur
CHANGED = {"open-set": "FedOV cannot destroy", "prototypes": "FAFI has no views of"}


def uploaded_name(task: str, architecture: str) -> str:
    """Return the name under which a client whose model is ``architecture`` uploads."""
    return {"cvae": DECODER, "statistics": SUMS}.get(task, f"{architecture}{SUFFIXES.get(task, '')}")


def uploaded_builders(  # noqa: PLR0913  what the models of six kinds of uploads depend on
    task: str,
    num_classes: int,
    input_shape: tuple[int, int, int],
    *,
    latent: int = 10,
    blocks: int = 2,
    sums: Callable[[], nn.Module] | None = None,
    own: Iterable[str] = (),
    normalization: tuple[Any, Any] | None = None,
) -> dict[str, Callable[[], nn.Module]]:
    """Return a picklable builder of every architecture that clients may upload for a task, by name.

    Args:
        task: ``"classifier"``, ``"open-set"``, ``"prototypes"``, ``"block"``, ``"cvae"`` or ``"statistics"``.
        num_classes: C, without the class "unknown".
        input_shape: (channels, height, width) of one image.
        blocks: K, of models that are cut into blocks.
        sums: Builds the sums of features; None for those of the default feature function.
        normalization: As in :func:`fl_app.models.build`.

    Raises:
        OptionError: No architecture of this task fits the examples' shape or number of classes.
    """
    if task == "classifier":
        return builders(num_classes, input_shape, own, normalization)
    if task in CHANGED:
        names = builders(num_classes, input_shape, own, normalization)
        if input_shape[0] not in (1, 3) or input_shape[1] != input_shape[2] or input_shape[1] < LEAST_SIDE:
            raise OptionError(
                f"{CHANGED[task]} examples of shape {tuple(input_shape)}: must be images, (channels, height, "
                f"width) with 1 or 3 channels, height = width, at least {LEAST_SIDE} pixels a side"
            )
        shared = num_classes, input_shape, normalization
        return {uploaded_name(task, name): partial(build_for, task, name, *shared) for name in names}
    if task == "block":
        first = partial(_first_block, blocks=blocks, num_classes=num_classes, input_shape=input_shape)
        whole = [name for name in builders(num_classes, input_shape) if blocks in CUTS.get(name, {})]
        return {uploaded_name(task, name): partial(first, name) for name in whole}
    if task == "statistics":
        return {SUMS: sums or partial(FeatureFunction().sums, num_classes)}
    decoder = partial(Decoder, num_classes, input_shape, latent=latent)
    decoder()  # raises for images of another size
    return {DECODER: decoder}


def model_builders(
    num_classes: int,
    input_shape: tuple[int, int, int],
    names: Iterable[str] = (),
    function: FeatureFunction | None = None,
    *,
    noise: float = 0.0,
    logits: bool = True,
) -> dict[str, Callable[[], nn.Module]]:
    """Return a picklable builder of every architecture of the zoo that fits, and of others that are named.

    Args:
        input_shape: (channels, height, width) of one image.
        names: Architectures. The user's own among them are tried out; backbones of heads and sums are built later.
        function: The run's feature function; None for the default one.
        noise: The deviation of the noise that a privacy budget demands of sums.
        logits: Whether the outputs of the user's own must be logits.

    Raises:
        OptionError: No architecture of the zoo fits the examples' shape or number of classes, or the user's own fails.
    """
    names = tuple(names)
    pixels = None if function is None else (function.mean, function.std)
    found = builders(num_classes, input_shape, filter(is_users, names), pixels, logits=logits)
    return found | feature_builders(names, function or FeatureFunction(), num_classes, noise=noise)


def build_for(
    task: str,
    name: str,
    num_classes: int,
    input_shape: tuple[int, int, int],
    normalization: tuple[Any, Any] | None = None,
) -> nn.Module:
    """Build the model that a client trains for a task.

    Args:
        task: ``"classifier"``; ``"open-set"``, with C + 1 outputs, the last of which means "unknown"; or
            ``"prototypes"``, without its last layer and with prototypes of the classes.
    """
    outputs = num_classes + (task == "open-set")
    model = build(name, num_classes=outputs, input_shape=input_shape, normalization=normalization)
    return PrototypeNet(model, num_classes) if task == "prototypes" else model


def _first_block(name: str, *, blocks: int, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return FirstBlock(cut(name, build(name, num_classes=num_classes, input_shape=input_shape), blocks))
