"""The steps of one client in one round on the gate of a mixture of experts, which needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..combiners.gate import mixture
from ..core.seeds import seeded_torch
from .training import Sgd

Array = np.ndarray[Any, Any]


def gate_steps(
    params: Mapping[str, Array], *, inputs: Array, logits: Array, labels: Array, sgd: Sgd, seed: int
) -> dict[str, Array]:
    """Return the gate's parameters after K steps; :func:`.training.local_steps` trains the other forms.

    Args:
        params: lambda, float32; not changed.
        inputs: x, the members' normalised input, float32 [n_i, ch, H, W].
        logits: Z, of every member on every held example, float32 [M, n_i, C].
        labels: y, int64 [n_i], in [0, C).
        sgd: K, B and eta_l.
        seed: Of this client and round, for the batches and dropout.

    Raises:
        ValueError: There are no examples.
    """
    if len(labels) == 0:
        raise ValueError("no examples to train the aggregator on")
    weights = {name: torch.tensor(value).requires_grad_() for name, value in params.items()}
    with seeded_torch(seed, "dropout"):
        for batch in sgd.batches(len(labels), seed):
            z, x, y = (torch.from_numpy(part) for part in (logits[:, batch], inputs[batch], labels[batch]))
            loss = F.cross_entropy(mixture(weights, z, x, dropout=True), y)
            gradients = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for value, gradient in zip(weights.values(), gradients, strict=True):
                    value -= sgd.lr * gradient
    return {name: value.detach().numpy() for name, value in weights.items()}
