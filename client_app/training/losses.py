"""The losses of local training.

Cross-entropy, as in all the papers, and LDAM, which gives classes with few examples a larger margin.

Paper: Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019,
    https://arxiv.org/abs/1906.07413.
Symbols: n_j -> counts[j]; Delta_j -> margins[j]; s -> scale; C -> chosen so that the rarest class's margin is largest.
Where: Section 3.2, the margins C / n_j^(1/4) -> margins_of; the loss L_LDAM -> ldam.
Deviations: the logits are a linear layer's, not cosines of normalised features and weights, because the uploaded model
    must be one of the zoo. The second, re-weighted stage of training (DRW) is left out. FedSyn (Zhang et al., 2021,
    Table 2) names the loss but no margin and no scale; 0.5 and 30 are those of LDAM's authors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_app.config import ClientConfig

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Of LDAM's authors.
LARGEST_MARGIN = 0.5
SCALE = 30.0


def loss_of(config: ClientConfig, labels: torch.Tensor) -> Loss:
    """Return a client's training loss: logits [B, C], labels [B] -> the mean over the batch, a scalar.

    Args:
        config: Names the loss.
        labels: All labels of the client [N], in 0 .. C - 1.
    """
    if config.loss == "cross-entropy":
        return F.cross_entropy
    margins = margins_of(torch.bincount(labels), LARGEST_MARGIN)
    return lambda logits, chosen: ldam(logits, chosen, margins, scale=SCALE)


def margins_of(counts: torch.Tensor, largest: float) -> torch.Tensor:
    """Return Delta_j, proportional to n_j^(-1/4) and scaled so that the rarest class has the largest margin.

    A class without examples has margin 0.

    Args:
        counts: n_j, examples per class [C], not negative.
        largest: The margin of the rarest class, in logits before the scale; at least 0.

    Returns:
        float32 [C], in [0, largest].
    """
    there = counts > 0
    raw = torch.where(there, counts.clamp(min=1).float() ** -0.25, 0.0)
    return largest * raw / raw.max()


def ldam(logits: torch.Tensor, labels: torch.Tensor, margins: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return the mean of ``-log softmax(scale * (z - Delta_y e_y))_y``, a scalar.

    Args:
        logits: z [B, C], unnormalised.
        labels: y [B], in 0 .. C - 1.
        margins: Delta [C], or shorter where the last classes have no examples, hence no labels.
        scale: s, positive.
    """
    behind = torch.zeros_like(logits).scatter_(1, labels[:, None], margins[labels][:, None])
    return F.cross_entropy(scale * (logits - behind), labels)


# Sharpness-aware minimisation: the gradient is taken where the loss is worst nearby.
#
# Paper: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021,
# https://arxiv.org/abs/2010.01412.
# Symbols: w -> the model's parameters; rho -> rho; p = 2; eps^(w) = rho g / ||g||_2, over all parameters together.
# Where: Eq. (2) -> the step to w + eps^(w); Eq. (3) and Alg. 1 -> sharpen.
# Deviations: none known. The paper leaves some choices open. Only the first pass updates batch normalisation's running
# statistics, so they belong to w and move once per step. The second pass normalises by its own batch and draws its
# own dropout mask. The base optimiser gets the second gradient, which is the clipped one. Co-Boosting (Dai et al.,
# ICLR 2024, Table 16) names no rho; 0.05 is Foret et al.'s.


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
