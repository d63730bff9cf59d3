"""Experts under a gate that learns from synthetic images: by the pixels, or by the experts' predictions.

Letters: M experts, B batch, C classes; f_k(x) logits of expert k, e(x) their plain mean, A(x) the mixture. The gate by
pixels and its losses are those of IntactOFL's published code (Zeng et al., ACM MM 2024). The other is this library's
own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..combiners.expert_gate import expert_divergence, expert_mixture, pixel_gate, weighed
from ..combiners.forms import uniform
from ..core.gpu import adam, sgd
from ..core.seeds import derive_seed
from .losses import adversarial_divergence, cross_entropy, soft_kl
from .perturbation import moved_by_sign, prediction_gradient
from .synthesis import Term, View

if TYPE_CHECKING:
    from ..method import Job, State
    from ..teacher.ensemble import Ensemble

# Constants of the published code.
ADVERSARIAL_TEMPERATURE, KD_TEMPERATURE = 3.0, 4.0
SPREAD_WEIGHT = 0.01


class Experts(nn.Module, ABC):
    """The experts under a gate; the gate alone is trained, and is all that the module's state holds.

    Attributes:
        combiner: The mixture's name.
        sort_labels: Whether the generator's labels are in ascending order.
        schedule: Of the gate's learning rate.
        lr: The rate where the options name none.
        clip: The largest norm of the gate's gradient; 0: no limit.
        moves: Whether :meth:`moved` changes images.
    """

    combiner: str
    sort_labels: bool
    schedule: str
    lr: float
    clip: float
    moves: bool

    def __init__(self, members: Ensemble, weights: State) -> None:
        super().__init__()
        self._members = (members,)  # in a tuple it is no part of this module
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture's logits [B, C] for normalised images [B, ch, H, W]."""
        return self.mixed(self._members[0](x), x)

    @staticmethod
    @abstractmethod
    def start(job: Job) -> State:
        """Return the gate before its first step."""

    @abstractmethod
    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        """Return the gate's optimiser."""

    @abstractmethod
    def mixed(self, logits: Tensor, x: Tensor) -> Tensor:
        """Return the mixture's logits [B, C] for the experts' [M, B, C] on normalised images x [B, ch, H, W]."""

    @abstractmethod
    def terms(self, weight: float) -> tuple[Term, Term]:
        """Return two terms of the generator: of the intended class, and of a disagreement, which has the weight."""

    @abstractmethod
    def moved(self, x: Tensor, size: float, directions: Tensor) -> Tensor:
        """Return normalised images [B, ch, H, W] as the gate learns from them; the directions are random [B, C]."""

    @abstractmethod
    def loss(self, logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return the gate's loss, a scalar, for the experts' logits [M, B, C] on images x with classes labels [B]."""


class ByPixels(Experts):
    """The gate of the published code."""

    combiner, sort_labels, schedule, lr, clip = "pixel-gate", True, "cosine", 0.01, 10.0
    moves = True

    @staticmethod
    def start(job: Job) -> State:
        """Return V [M, ch H W] and b [M] as torch draws a linear layer's, each client's row by its name."""
        pixels = math.prod(job.input_shape)
        seeds = [derive_seed(job.seed, "gate", upload.client) for upload in job.uploads]
        rows = np.stack([uniform(np.random.default_rng(seed), pixels**-0.5, pixels + 1) for seed in seeds])
        return {"weight": torch.from_numpy(rows[:, 1:].copy()), "bias": torch.from_numpy(rows[:, 0].copy())}

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        """Return SGD with momentum 0.9 and weight decay 1e-4."""
        return sgd(self.parameters(), lr, 0.9, 1e-4)

    def mixed(self, logits: Tensor, x: Tensor) -> Tensor:
        """Return A(x) [B, C]."""
        return weighed(logits, self.weights(x))

    def weights(self, x: Tensor) -> Tensor:
        """Return g(x) [B, M]."""
        return pixel_gate(dict(self.named_parameters()), x)

    def terms(self, weight: float) -> tuple[Term, Term]:
        """Return CE(A, y), and minus the disagreement of A with the plain mean."""

        def disagreement(view: View) -> Tensor:
            mixed, mean = self.mixed(view.teacher, view.inputs), view.teacher.mean(0)
            return adversarial_divergence(mixed, mean, ADVERSARIAL_TEMPERATURE)

        return (
            Term("ce", 1.0, lambda view: cross_entropy(self.mixed(view.teacher, view.inputs), view.labels)),
            Term("distinct", weight, disagreement),
        )

    def moved(self, x: Tensor, size: float, directions: Tensor) -> Tensor:
        """Return images moved to where the plain mean's prediction changes most."""
        gradient = prediction_gradient(lambda moving: self._members[0](moving).mean(0), x, directions)
        return moved_by_sign(x, gradient, size)

    def loss(self, logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return ``CE(A, y) + 0.01 std(g) + 16 KL(sm(e / 4) || sm(A / 4))``, std that of all B M weights."""
        weights = self.weights(x)
        mixed = weighed(logits, weights)
        distilled = soft_kl(mixed, logits.mean(0), KD_TEMPERATURE)
        return cross_entropy(mixed, labels) + SPREAD_WEIGHT * weights.std() + distilled


class ByPredictions(Experts):
    """The gate on the experts' predictions."""

    combiner, sort_labels, schedule, lr, clip = "expert-gate", False, "constant", 1e-3, 0.0
    moves = False

    @staticmethod
    def start(job: Job) -> State:
        """Return W [M, M C] and b [M] of zeros: all experts count the same."""
        members = len(job.uploads)
        return {"weight": torch.zeros(members, members * job.num_classes), "bias": torch.zeros(members)}

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        """Return Adam."""
        return adam(self.parameters(), lr)

    def mixed(self, logits: Tensor, x: Tensor) -> Tensor:  # noqa: ARG002
        """Return the logarithms of the mixture's probabilities [B, C]."""
        return expert_mixture(dict(self.named_parameters()), logits)

    def terms(self, weight: float) -> tuple[Term, Term]:
        """Return ``mean_k CE(f_k, y)``, and minus the divergence of the experts."""
        return (
            Term("ce", 1.0, experts_cross_entropy),
            Term("distinct", weight, lambda view: -expert_divergence(view.teacher)),
        )

    def moved(self, x: Tensor, size: float, directions: Tensor) -> Tensor:  # noqa: ARG002
        """Return the images as they are."""
        return x

    def loss(self, logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return ``CE(A, y)``."""
        return cross_entropy(self.mixed(logits, x), labels)


def experts_cross_entropy(view: View) -> Tensor:
    """Return ``mean_k mean_i CE(f_k(x_i), y_i)``, a scalar; the view's teacher is all members' logits [M, B, C]."""
    return cross_entropy(view.teacher.flatten(0, 1), view.labels.repeat(len(view.teacher)))


GATES: dict[str, type[Experts]] = {"pixels": ByPixels, "predictions": ByPredictions}
