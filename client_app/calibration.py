"""The ranges of a client's activations on its own training examples, for INT8."""

from __future__ import annotations

import torch
from torch import nn

from fl_app.data import ImageData, Normalization, normalize
from strategies.client.calibration import calibrate
from strategies.core.seeds import generator

# The range over this many examples is close to that over all, and takes seconds with the largest model.
EXAMPLES = 512
BATCH = 128


def activation_ranges(
    model: nn.Module, data: ImageData, normalization: Normalization, *, seed: int
) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest output of each layer on at most :data:`EXAMPLES` examples.

    Args:
        model: On the CPU; left unchanged.
        data: The client's training examples, without augmentation.
        normalization: Of the pixels, before the model.
        seed: Fixes which examples are used, if there are more.

    Returns:
        Layer name -> (smallest, largest); empty without examples.

    Raises:
        UploadError: A layer's output is not finite.
    """
    chosen = torch.randperm(len(data.labels), generator=generator(seed, "calibration"))[:EXAMPLES]
    parts = (part for part in torch.split(chosen.sort().values, BATCH) if len(part))
    return calibrate(model, (normalize(data.images[part], *normalization) for part in parts))
