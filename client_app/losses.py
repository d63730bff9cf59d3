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

from collections.abc import Callable

import torch
from torch.nn import functional as F

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
