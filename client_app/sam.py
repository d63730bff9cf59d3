"""Sharpness-aware minimisation: the gradient is taken where the loss is worst nearby.

Paper: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021,
    https://arxiv.org/abs/2010.01412.
Symbols: w -> the model's parameters; rho -> rho; p = 2; eps^(w) = rho g / ||g||_2, over all parameters together.
Where: Eq. (2) -> the step to w + eps^(w); Eq. (3) and Alg. 1 -> sharpen.
Deviations: none known. The paper leaves some choices open. Only the first pass updates batch normalisation's running
    statistics, so they belong to w and move once per step. The second pass normalises by its own batch and draws its
    own dropout mask. The base optimiser gets the second gradient, which is the clipped one. Co-Boosting (Dai et al.,
    ICLR 2024, Table 16) names no rho; 0.05 is Foret et al.'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# Added to a gradient's norm, so that a zero gradient is not divided by zero.
TINY = 1e-12


def sharpen(model: nn.Module, loss: Callable[[], torch.Tensor], *, rho: float) -> None:
    """Replace the gradients g at the weights w by those at ``w + rho * g / ||g||``; the weights stay.

    Args:
        model: In training mode, with its gradients at w.
        loss: Computes the loss of the same batch again, a scalar.
        rho: Radius of the neighbourhood, positive.
    """
    moved = [(p, p.grad, p.detach().clone()) for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([gradient for _, gradient, _ in moved])
    stride = rho / (float(norm) + TINY)
    with torch.no_grad():
        for parameter, gradient, _ in moved:
            parameter.add_(gradient, alpha=stride)
            parameter.grad = None
    with statistics_at_rest(model):
        loss().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter, _, start in moved:
            parameter.copy_(start)  # to the bit: w + eps - eps is not w


@contextmanager
def statistics_at_rest(model: nn.Module) -> Iterator[None]:
    """Let batch normalisation use its batch, as in training, without updating running statistics and counter."""
    tracking = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True
