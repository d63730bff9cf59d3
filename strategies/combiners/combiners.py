"""Combiners of the logits of M members, [M, B, C] -> [B, C].

A combiner stores its arguments as buffers and normalises them when it is applied. A combiner rebuilt from its stored
tensors therefore gives the same bits. All but voting pass gradients to the logits. Those of FENS (Allouah et al.,
*Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, section 3 and Figure 8) have the tensor names of
:mod:`.aggregators`.

A combiner with the attribute ``sees_input`` is called with the members' input as well: see :meth:`.Ensemble.combine`.
One whose attribute ``batch_statistics`` is true has members whose batch normalisation uses the batch that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.registry import Registry
from .opinion_pools import OpinionPool, class_shares
from .trained import Linear, TwoLayers, register


class Mean(nn.Module):
    """The plain mean of logits, ``(1/M) sum_k f_k(x)``."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        return logits.mean(0)


class MeanProbability(nn.Module):
    """The logarithm of the plain mean of probabilities, ``log((1/M) sum_k softmax(f_k(x)))``."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C], whose softmax is the mean of the members' softmax."""
        return torch.logsumexp(torch.log_softmax(logits, dim=2), dim=0) - math.log(len(logits))


class Weighted(nn.Module):
    """A mean weighted per member, ``sum_k w_k f_k(x) / sum_k w_k``.

    Args:
        weights: Numbers w_k >= 0 [M], not all zero; they need not sum to one.

    Raises:
        ValueError: The weights are not one-dimensional, one is negative, or all are zero.
    """

    weights: Tensor

    def __init__(self, weights: Sequence[float] | Tensor) -> None:
        super().__init__()
        values = torch.as_tensor(weights, dtype=torch.float32)
        if values.dim() != 1 or not bool((values >= 0).all()) or not float(values.sum()) > 0:
            raise ValueError(f"weights per member are {values.tolist()}: must be numbers from 0, not all zero")
        self.register_buffer("weights", values.clone())

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        return torch.einsum("m,mbc->bc", self.weights / self.weights.sum(), logits)


class WeightedSum(Weighted):
    """A sum weighted per member, ``sum_k w_k f_k(x)``: Eq. (2) of Co-Boosting (Dai et al., ICLR 2024) as printed."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        return torch.einsum("m,mbc->bc", self.weights, logits)


class LabelCount(nn.Module):
    """A mean weighted per member and class, ``sum_k n_k^c f_k(x)_c / sum_j n_j^c``.

    "Weighted averaging" of Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024,
    section 3. A class that no member holds gets weight zero, and therefore logit zero.

    Args:
        weights: n_k^c >= 0, the examples of class c that member k was trained on [M, C].

    Raises:
        ValueError: The counts are not two-dimensional, or one is negative.
    """

    weights: Tensor

    def __init__(self, weights: Sequence[Sequence[float]] | Tensor) -> None:
        super().__init__()
        values = torch.as_tensor(weights, dtype=torch.float32)
        if values.dim() != 2 or not bool((values >= 0).all()):
            raise ValueError(f"label counts have shape {tuple(values.shape)}: must be [M, C], numbers from 0")
        self.register_buffer("weights", values.clone())

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C]."""
        return torch.einsum("mc,mbc->bc", class_shares(self.weights), logits)


def weighted_mean_gradient(weights: Tensor, member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``d/dw mean_i CE(A_i, y_i)`` for ``A_i = sum_k w_k z_k,i / sum_k w_k``, the :class:`Weighted` ensemble.

    Eq. (12) of Co-Boosting (Dai et al., ICLR 2024) in closed form: with the residual ``r_i = sm(A_i) - onehot(y_i)``,
    component k is ``sum_i <z_k,i - A_i, r_i> / (B sum_j w_j)``.

    Args:
        weights: w >= 0 [M], not all zero.
        member_logits: z [M, B, C].
        labels: y [B], whole numbers in [0, C).

    Returns:
        The gradient [M].
    """
    total = weights.sum()
    combined = torch.einsum("m,mbc->bc", weights / total, member_logits)
    residual = torch.softmax(combined, dim=1)
    residual[torch.arange(len(labels), device=labels.device), labels] -= 1
    return torch.einsum("mbc,bc->m", member_logits - combined, residual) / (len(labels) * total)


@torch.enable_grad()
def weights_gradient(combiner: nn.Module, member_logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``d/dw mean_i CE(A_i, y_i)`` for the buffer ``weights`` of any combiner A, by autograd.

    Args:
        combiner: A module [M, B, C] -> [B, C] that passes gradients; not changed.
        member_logits: z [M, B, C], as constants.
        labels: y [B], whole numbers in [0, C).

    Returns:
        The gradient, with the shape of the weights.
    """
    weights = combiner.get_buffer("weights").detach().clone().requires_grad_()
    combined = torch.func.functional_call(combiner, {"weights": weights}, (member_logits.detach(),))
    (gradient,) = torch.autograd.grad(F.cross_entropy(combined, labels), weights)
    return gradient


COMBINERS: Registry[Callable[..., nn.Module]] = Registry(
    "combiner",
    {
        "mean": "combiners.combiners:Mean",
        "mean-probability": "combiners.combiners:MeanProbability",
        "weighted": "combiners.combiners:Weighted",
        "weighted-sum": "combiners.combiners:WeightedSum",
        "label-count": "combiners.combiners:LabelCount",
        "linear": "combiners.trained:Linear",
        "per-class": "combiners.trained:PerClass",
        "nn": "combiners.trained:TwoLayers",
        "voting": "combiners.trained:Voting",
        "moe": "combiners.gate:Gate",
        "expert-gate": "methods.intactofl:ExpertGate",
        "pixel-gate": "methods.intactofl:PixelGate",
        "two-class-average": "combiners.combiners:TwoClassMean",
        "two-class-weighted": "combiners.combiners:TwoClassLabelCount",
        "two-class-per-class": "combiners.combiners:TwoClassLinear",
        "two-class-nn": "combiners.combiners:TwoClassTwoLayers",
        "open-set": "methods.fedov:OpenSet",
        "prototypes": "methods.fafi:Prototypes",
        "fused-blocks": "combiners.fused_blocks:FusedBlocks",
        "gated-log-pool": "combiners.update_gate:GATED_LOG_POOL",
        "gated-linear-pool": "combiners.update_gate:GATED_LINEAR_POOL",
        "log-pool": "combiners.opinion_pools:LOG_POOL",
        "linear-pool": "combiners.opinion_pools:LINEAR_POOL",
    },
)


def name_of(combiner: nn.Module) -> str:
    """Return the name under which a combiner can be rebuilt."""
    if isinstance(combiner, OpinionPool):
        return f"{combiner.kind}{combiner.rule}-pool"
    return next(name for name, kind in COMBINERS.items() if kind is type(combiner))


def build_combiner(
    name: str, weights: Mapping[str, Tensor], member: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Rebuild a combiner from its name and its tensors (its ``state_dict``).

    Args:
        name: A key of :data:`COMBINERS`.
        member: Builds a module like the first member, for a combiner whose structure is the members' own.

    Raises:
        ValueError: The name is unknown, or the tensors do not fit that combiner.
    """
    if name not in COMBINERS:
        raise ValueError(f"unknown combiner {name!r}: known are {', '.join(sorted(COMBINERS))}")
    if (of_member := getattr(COMBINERS[name], "of_member", None)) is not None:
        made: nn.Module = of_member(member, weights)
        return made
    try:
        return COMBINERS[name](**weights)
    except TypeError as error:
        raise ValueError(f"combiner {name!r} cannot be built from tensors {sorted(weights)}") from error


# The combiners of models of two classes, which read each member's log-odds of class 1, ``d = z_1 - z_0``.
#
# Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, the forms for Fed-Heart-Disease
# and Camelyon16. The paper's models have one logit z, which here is (0, z); these combiners return logits (0, z) too.
# :mod:`.aggregators` has those that are trained in numpy, with the same tensors.


# Replaces a share of zero in logarithms.
TINY = torch.finfo(torch.float32).tiny


class TwoClassMean(nn.Module):
    """``log(s_1 / s_0)``, ``s_c = (1/M) sum_i p_i(c)``: the mean of probabilities."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        return _odds(logits.log_softmax(2).logsumexp(0))


class TwoClassLabelCount(nn.Module):
    """``log(s_1 / s_0)``, ``s_c = sum_i lambda_i[c] p_i(c)``, ``lambda_i[c] = n_i^c / sum_j n_j^c``.

    A class that no client holds has a share of ``TINY``.

    Args:
        weights: n_i^c >= 0, the examples of class c that member i was trained on [M, 2].
    """

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        register(self, {"weights": (weights, 2)})

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        shares = class_shares(self.weights).clamp(min=TINY)
        return _odds((shares.log()[:, None] + logits.log_softmax(2)).logsumexp(0))


class TwoClassLinear(Linear):
    """``sum_i w_i d_i + b``, the aggregator for Fed-Heart-Disease, with the tensors of :class:`.trained.Linear`."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        return _beside_zero(self.weight @ (logits[..., 1] - logits[..., 0]) + self.bias)


class TwoClassTwoLayers(TwoLayers):
    """``W2 sigmoid(W1 d + b1) + b2``, which Table 8 does not have: W1 [8, M], b1 [8], W2 [1, 8], b2 [1]."""

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, 2] to [B, 2]."""
        d = (logits[..., 1] - logits[..., 0]).T
        hidden = F.linear(d, self.weight1, self.bias1).sigmoid()
        return _beside_zero(F.linear(hidden, self.weight2, self.bias2)[:, 0])


def _odds(log_s: Tensor) -> Tensor:
    return _beside_zero(log_s[:, 1] - log_s[:, 0])


def _beside_zero(z: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(z), z], dim=1)
