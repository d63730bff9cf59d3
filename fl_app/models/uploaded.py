"""What clients upload that is no classifier of the zoo: one with a further output, or the decoder of a CVAE.

A task is what a server method has its clients train: ``"classifier"``, ``"open-set"`` or ``"cvae"``. The name of an
upload's architecture tells its task, to the server as to a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from strategies.core.errors import OptionError

from . import build, builders

UNKNOWN = "+unknown"
DECODER = "cvae-decoder"
LEAST_SIDE = 4  # of an image whose parts can be exchanged and blurred


def uploaded_name(task: str, architecture: str) -> str:
    """Return the name under which a client whose model is ``architecture`` uploads."""
    return {"classifier": architecture, "open-set": f"{architecture}{UNKNOWN}", "cvae": DECODER}[task]


def uploaded_builders(
    task: str, num_classes: int, input_shape: tuple[int, int, int], *, latent: int = 10
) -> dict[str, Callable[[], nn.Module]]:
    """Return a builder, which pickles, of everything that clients may upload for a task, by name.

    Args:
        task: ``"classifier"``, ``"open-set"`` or ``"cvae"``.
        num_classes: C, without the class "unknown".
        input_shape: (channels, height, width) of one image.
        latent: The length of a decoder's noise.

    Raises:
        OptionError: Nothing of this kind takes such examples or so many classes.
    """
    if task == "classifier":
        return builders(num_classes, input_shape)
    if task == "open-set":
        names = builders(num_classes, input_shape)
        if input_shape[0] not in (1, 3) or input_shape[1] != input_shape[2] or input_shape[1] < LEAST_SIDE:
            raise OptionError(
                f"examples of shape {tuple(input_shape)} cannot be destroyed as FedOV does it: must be images, "
                f"(channels, height, width) with 1 or 3 channels, height = width, at least {LEAST_SIDE} pixels a side"
            )
        return {uploaded_name(task, name): open_set_builder(name, num_classes, input_shape) for name in names}
    decoder = partial(_decoder, num_classes, input_shape, latent=latent)
    decoder()  # refuses images of another size
    return {DECODER: decoder}


def open_set_builder(name: str, num_classes: int, input_shape: tuple[int, int, int]) -> Callable[[], nn.Module]:
    """Return the builder of a classifier with one output more than classes: the last one means "unknown"."""
    return partial(build, name, num_classes=num_classes + 1, input_shape=input_shape)


def _decoder(num_classes: int, input_shape: tuple[int, int, int], *, latent: int) -> nn.Module:
    from .cvae import Decoder  # late: most runs have none

    return Decoder(num_classes, input_shape, latent=latent)
