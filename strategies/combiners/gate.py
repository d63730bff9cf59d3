"""The gate of FENS's mixture of experts: a small network that weighs the members by the input.

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, Figure 8 and its code. The gate
has two blocks, of 6 and 16 maps, each a 5x5 convolution, ReLU and 2x2 max pooling. Layers of 120 units (then dropout of
one half) and 84 units with ReLU follow, and a layer of M outputs. The mixture is ``sum_i g_i(x) z_i(x)`` with g the
softmax of the outputs. For CIFAR-100 the code has M C outputs instead: weights per member and class, without a softmax.
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
from .aggregators import uniform

Array = np.ndarray[Any, Any]

MAPS = (6, 16)
UNITS = (120, 84)
KERNEL = 5
DROPOUT = 0.5
NAMES = tuple(
    f"{layer}_{part}" for layer in ("conv1", "conv2", "layer1", "layer2", "layer3") for part in ("weight", "bias")
)


class Gate(nn.Module):
    """A mixture of experts, built from the tensors of its gate, which sees the members' input.

    Args:
        **weights: The tensors, named as by :func:`start_gate`.

    Raises:
        ValueError: The names are not those of a gate's tensors.
    """

    sees_input = True

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        if weights.keys() != set(NAMES):
            raise ValueError(f"a gate's tensors are {sorted(weights)}: must be {', '.join(NAMES)}")
        for name, value in weights.items():
            self.register_buffer(name, value.clone())

    def forward(self, logits: Tensor, x: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C], given the members' normalised input [B, ch, H, W]."""
        return mixture(dict(self.named_buffers()), logits, x)


def mixture(weights: Mapping[str, Tensor], logits: Tensor, x: Tensor, *, dropout: bool = False) -> Tensor:
    """Return ``sum_i g_i(x) z_i(x)``; with M C outputs, ``sum_i g_i(x) * z_i(x)`` with weights per class.

    Args:
        weights: The gate's tensors, named as by :func:`start_gate`.
        logits: Of the members [M, B, C].
        x: Their normalised input [B, ch, H, W].
        dropout: Whether to apply dropout, drawn from torch's global random state.
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
    seed: int | None,
    *,
    members: int,
    classes: int,
    input_shape: Sequence[int],
    per_class: bool = False,
) -> dict[str, Array]:
    """Return the gate's float32 parameters for the first round, drawn as torch initialises its layers.

    Args:
        seed: The run's seed; None: not drawn, for their names and shapes alone.
        members: M.
        classes: C.
        input_shape: Of one image: (channels, height, width).
        per_class: Whether the outputs are M C raw weights, as in the paper's code from 100 classes on.

    Raises:
        OptionError: The input is no image, or too small for the gate's convolutions.
    """
    left = [((side - KERNEL + 1) // 2 - KERNEL + 1) // 2 for side in input_shape[1:]]
    if len(left) != 2 or min(left) < 1:
        found = " x ".join(map(str, input_shape)) or "absent"
        raise OptionError(f"aggregator 'moe' looks at images, and the input is {found}: must be at least 16 x 16")
    rng = None if seed is None else np.random.default_rng(derive_seed(seed, "aggregator", "moe"))
    widths = [MAPS[1] * left[0] * left[1], *UNITS, members * classes if per_class else members]
    shapes: dict[str, tuple[int, ...]] = {f"layer{n}": (widths[n], widths[n - 1]) for n in (1, 2, 3)}
    shapes |= {"conv1": (MAPS[0], input_shape[0], KERNEL, KERNEL), "conv2": (MAPS[1], MAPS[0], KERNEL, KERNEL)}
    params = {}
    for layer, shape in shapes.items():
        bound = math.prod(shape[1:]) ** -0.5  # torch's default, 1 / sqrt(fan in), for weights and biases
        params[f"{layer}_weight"], params[f"{layer}_bias"] = uniform(rng, bound, *shape), uniform(rng, bound, shape[0])
    return params
