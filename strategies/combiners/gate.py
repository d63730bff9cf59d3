"""The gate of FENS's mixture of experts: a small network that looks at the input and says whom to believe.

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, Figure 8 and its code. The gate is
5x5 convolution to 6 maps, ReLU, maximum of 2x2; the same to 16 maps; layers of 120 (then dropout of one half) and 84
units with ReLU; and a layer of M outputs: ``sum_i g_i(x) z_i(x)`` with g their softmax. For CIFAR-100 the code has
M C outputs instead, which are weights per member and class as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.seeds import derive_seed
from .forms import uniform

Array = np.ndarray[Any, Any]

MAPS = (6, 16)
UNITS = (120, 84)
KERNEL = 5
DROPOUT = 0.5
NAMES = tuple(
    f"{layer}_{part}" for layer in ("conv1", "conv2", "layer1", "layer2", "layer3") for part in ("weight", "bias")
)


class Gate(nn.Module):
    """A mixture of experts, built from the tensors of its gate; it looks at the members' input.

    Args:
        **weights: As :func:`start_gate` names them.

    Raises:
        ValueError: They are not those of a gate.
    """

    sees_input = True

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        if weights.keys() != set(NAMES):
            raise ValueError(f"a gate's tensors are {', '.join(NAMES)}; given are {sorted(weights)}")
        for name, value in weights.items():
            self.register_buffer(name, value.clone())

    def forward(self, logits: Tensor, x: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C], given the members' normalised input [B, ch, H, W]."""
        return mixture(dict(self.named_buffers()), logits, x)


def mixture(weights: Mapping[str, Tensor], logits: Tensor, x: Tensor, *, dropout: bool = False) -> Tensor:
    """Return ``sum_i g_i(x) z_i(x)``; with M C outputs, ``sum_i g_i(x) * z_i(x)`` with weights per class.

    Args:
        weights: The gate's, as :func:`start_gate` names them.
        logits: Of the members [M, B, C].
        x: Their normalised input [B, ch, H, W].
        dropout: Whether units are dropped; drawn from torch's global state.
    """
    for layer in ("conv1", "conv2"):
        x = F.max_pool2d(F.relu(F.conv2d(x, weights[f"{layer}_weight"], weights[f"{layer}_bias"])), 2)
    x = F.relu(F.linear(x.flatten(1), weights["layer1_weight"], weights["layer1_bias"]))
    x = F.relu(F.linear(F.dropout(x, DROPOUT, dropout), weights["layer2_weight"], weights["layer2_bias"]))
    outputs = F.linear(x, weights["layer3_weight"], weights["layer3_bias"])
    members, _, classes = logits.shape
    if outputs.shape[1] == members:
        return torch.einsum("bm,mbc->bc", outputs.softmax(1), logits)
    return torch.einsum("bmc,mbc->bc", outputs.view(-1, members, classes), logits)


def start_gate(
    seed: int,
    *,
    members: int,
    classes: int,
    input_shape: Sequence[int],
    per_class: bool = False,
    asked_by: str = "aggregator 'moe'",
) -> dict[str, Array]:
    """Return the gate's float32 parameters that the first round starts from, as torch starts its layers.

    Args:
        seed: The run's seed.
        members: M.
        classes: C.
        input_shape: Of one image: (channels, height, width).
        per_class: Whether the outputs are M C raw weights, as the paper's code has it from 100 classes on.
        asked_by: Whose gate it is, as the beginning of an error.

    Raises:
        OptionError: The input is no image, or one that nothing is left of.
    """
    channels, *sides = input_shape
    left = [((side - KERNEL + 1) // 2 - KERNEL + 1) // 2 for side in sides]
    if len(left) != 2 or min(left) < 1:
        found = " x ".join(map(str, input_shape))
        raise OptionError(f"{asked_by} looks at images, and the input is {found}: must be at least 16 x 16")
    rng = np.random.default_rng(derive_seed(seed, "aggregator", "moe"))
    widths = [MAPS[1] * left[0] * left[1], *UNITS, members * classes if per_class else members]
    shapes: dict[str, tuple[int, ...]] = {f"layer{n}": (widths[n], widths[n - 1]) for n in (1, 2, 3)}
    shapes |= {"conv1": (MAPS[0], channels, KERNEL, KERNEL), "conv2": (MAPS[1], MAPS[0], KERNEL, KERNEL)}
    params = {}
    for layer, shape in shapes.items():
        bound = math.prod(shape[1:]) ** -0.5  # torch's default, 1 / sqrt(fan in), for weights and biases
        params[f"{layer}_weight"], params[f"{layer}_bias"] = uniform(rng, bound, *shape), uniform(rng, bound, shape[0])
    return params
