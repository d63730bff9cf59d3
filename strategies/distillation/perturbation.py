"""The direction in which a small change of an image changes a prediction most.

The diversification of Co-Boosting (Dai et al., ICLR 2024, Eqs. (9), (10)). The published code of IntactOFL moves its
images so, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PERTURBATION_TEMPERATURE = 4.0  # of the softened probabilities in both published codes


def draw_directions(count: int, classes: int, rng: torch.Generator) -> Tensor:
    """Return u [B, C] drawn from U[-1, 1] by a generator on the CPU, for B images and C classes."""
    return torch.rand((count, classes), generator=rng).mul_(2).sub_(1)


def prediction_gradient(
    predict: Callable[[Tensor], Tensor], inputs: Tensor, directions: Tensor, *, softened: bool = True
) -> Tensor:
    """Return ``grad_x sum_i u_i . sm(z(x_i) / 4)``.

    Args:
        predict: Normalised images [B, ch, H, W] -> logits z [B, C].
        inputs: x [B, ch, H, W], normalised.
        directions: u [B, C], see :func:`draw_directions`.
        softened: False takes the logits themselves, as the text of Co-Boosting.

    Returns:
        The gradient [B, ch, H, W].
    """
    inputs = inputs.detach().requires_grad_()
    values = predict(inputs)
    if softened:
        values = torch.softmax(values / PERTURBATION_TEMPERATURE, dim=1)
    (gradient,) = torch.autograd.grad((directions * values).sum(), inputs)
    return gradient


def step_by_sign(inputs: Tensor, gradient: Tensor, size: float) -> Tensor:
    """Return ``x + size * sign(gradient)``: where the gradient is not 0, each pixel moves by ``size``."""
    return torch.add(inputs.detach(), gradient.sign(), alpha=size)
