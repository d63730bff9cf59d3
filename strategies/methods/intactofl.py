"""IntactOFL: the uploaded models stay as they are, as experts; a gate over them learns from synthetic images.

Paper: Zeng, Xu, Zhou, Wu, Kang, Cai, Niyato, One-shot-but-not-degraded Federated Learning, ACM MM 2024,
    https://doi.org/10.1145/3664647.3680715. Read version: the abstract, and the authors' code.
Symbols: f_k(x) -> logits of member k; e(x) -> their plain mean; A(x) -> the mixture (1/M) sum_k g_k(x) f_k(x);
    g(x) = V x + b -> expert_gate.pixel_gate; T -> epochs; eps -> perturbation_size.
Where: the generator's loss, CE(A, y), the statistics, and the disagreement of A with e -> ByPixels.terms;
    images moved by eps -> losses.prediction_gradient; the gate's loss -> ByPixels.loss.
Deviations: of the paper only the abstract was read; all formulas are those of its code. There eps is 8 in normalised
    pixels, which leaves only signs of an image. The default is 8/255, as in the same authors' copy of Co-Boosting;
    preset "published-code" has 8. The published clients freeze batch normalisation after an epoch and hold
    overlapping parts of the data; here clients train as for any method.
Another gate: with ``gate = "predictions"`` it is this library's own. It is linear in the experts' predictions, the
    mixture is one of probabilities, the images are those that experts disagree on, and nothing moves them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..combiners.aggregators import uniform
from ..combiners.trained import register
from ..core.gpu import Graphed, adam, set_rate, sgd
from ..core.options import Always, config_class, option, presets
from ..core.seeds import derive_seed, generator
from ..core.work import work
from ..distillation import settings
from ..distillation.distill import take_step
from ..distillation.epochs import Stage, learning_rate, run_epochs
from ..distillation.losses import (
    adversarial_divergence,
    cross_entropy,
    draw_directions,
    prediction_gradient,
    soft_kl,
    step_by_sign,
)
from ..distillation.pool import Pool, shuffled_batches
from ..distillation.settings import PoolOptions, SynthesisOptions, shared
from ..distillation.synthesis import Batch, GeneratedImages, Term, View
from ..method import EnsembleSpec, Job, Method, Need, Outcome, Plan, Progress, State
from ..teacher.augment import AUGMENTATIONS, Standardize, dequantize
from ..teacher.batchnorm import batchnorm_loss, note_without_statistics, reads_statistics
from ..teacher.ensemble import Ensemble

# Linear gates that weigh the experts of a mixture: by the image's pixels, or by the predictions of all experts.
#
# The mixture of experts is that of Jacobs, Jordan, Nowlan, Hinton, *Adaptive Mixtures of Local Experts*, Neural
# Computation 1991. The gate on pixels is that of IntactOFL's published code (Zeng et al., ACM MM 2024). The gate on
# predictions is this library's own: it sees no image, and so learns little that holds for synthetic images alone. With
# zero weights all experts count the same in it.


class PixelGate(nn.Module):
    """``(1/M) sum_k g_k(x) z_k``, g(x) = V x + b on flattened images x; the weights g have any sign and any sum.

    Args:
        weight: V [M, ch H W].
        bias: b [M].

    Raises:
        ValueError: The shapes do not match.
    """

    sees_input = True
    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        register(self, {"weight": (weight, 2), "bias": (bias, 1)})
        if len(bias) != len(weight):
            raise ValueError(f"a gate's weight is {list(weight.shape)} and its bias {list(bias.shape)}: must be "
                             "[M, ch H W] and [M]")  # fmt: skip

    def forward(self, logits: Tensor, x: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, C], given the members' normalised input x [B, ch, H, W]."""
        return weigh_experts(logits, pixel_gate(dict(self.named_buffers()), x))


def pixel_gate(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the weights ``g(x) = V x + b`` [B, M].

    Args:
        weights: The gate's ``weight`` [M, ch H W] and ``bias`` [M].
        x: Normalised images [B, ch, H, W].
    """
    return F.linear(x.flatten(1), weights["weight"], weights["bias"])


def weigh_experts(logits: Tensor, gate: Tensor) -> Tensor:
    """Return ``(1/M) sum_k g_k z_k`` [B, C] for member logits z [M, B, C] and weights g [B, M]."""
    return torch.einsum("bm,mbc->bc", gate, logits) / len(logits)


class ExpertGate(nn.Module):
    """``log sum_k g_k sm(z_k)``, g = sm(W p + b), with p the concatenated predictions sm(z_k) of all members.

    Args:
        weight: W [M, M C].
        bias: b [M].

    Raises:
        ValueError: The shapes do not match.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        register(self, {"weight": (weight, 2), "bias": (bias, 1)})
        members, inputs = weight.shape
        if len(bias) != members or inputs % members:
            raise ValueError(f"a gate's weight is {list(weight.shape)} and its bias {list(bias.shape)}: must be "
                             "[M, M C] and [M]")  # fmt: skip

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to logits [B, C], whose softmax is the mixture's prediction."""
        return expert_mixture(dict(self.named_buffers()), logits)


def expert_mixture(weights: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Return ``log sum_k g_k sm(z_k)`` [B, C].

    Args:
        weights: The gate's ``weight`` [M, M C] and ``bias`` [M].
        logits: Of the members [M, B, C].
    """
    opinions = torch.log_softmax(logits, dim=2)
    gate = F.linear(opinions.exp().transpose(0, 1).flatten(1), weights["weight"], weights["bias"])
    return torch.logsumexp(torch.log_softmax(gate, dim=1).T[:, :, None] + opinions, dim=0)


def expert_divergence(logits: Tensor) -> Tensor:
    """Return ``mean_i (1/M) sum_k KL(p_k,i || (1/M) sum_j p_j,i)``, the Jensen-Shannon divergence of M predictions.

    Lin, *Divergence Measures Based on the Shannon Entropy*, 1991, with equal weights.

    Args:
        logits: Of the members [M, B, C].

    Returns:
        A scalar from 0, for equal predictions, to log M, if no two predictions share a class.
    """
    opinions = torch.log_softmax(logits, dim=2)
    middle = torch.logsumexp(opinions, dim=0) - math.log(len(logits))
    return (opinions.exp() * (opinions - middle)).sum(2).mean()


# Experts under a gate that learns from synthetic images: by the pixels, or by the experts' predictions.
#
# Letters: M experts, B batch, C classes; f_k(x) logits of expert k, e(x) their plain mean, A(x) the mixture. The gate
# by pixels and its losses are those of IntactOFL's published code (Zeng et al., ACM MM 2024). The other is this
# library's own.


# Constants of the published code.
ADVERSARIAL_TEMPERATURE, KD_TEMPERATURE = 3.0, 4.0
SPREAD_WEIGHT = 0.01


class Experts(nn.Module, ABC):
    """The experts under a gate; the gate alone is trained, and is all that the module's state holds.

    Attributes:
        sort_labels: Whether the generator's labels are in ascending order.
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
        return weigh_experts(logits, self.weights(x))

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
        return step_by_sign(x, gradient, size)

    def loss(self, logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return ``CE(A, y) + 0.01 std(g) + 16 KL(sm(e / 4) || sm(A / 4))``, std that of all B M weights."""
        weights = self.weights(x)
        mixed = weigh_experts(logits, weights)
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

        def ce(view: View) -> Tensor:
            return cross_entropy(view.teacher.flatten(0, 1), view.labels.repeat(len(view.teacher)))

        return Term("ce", 1.0, ce), Term("distinct", weight, lambda view: -expert_divergence(view.teacher))

    def moved(self, x: Tensor, size: float, directions: Tensor) -> Tensor:  # noqa: ARG002
        """Return the images as they are."""
        return x

    def loss(self, logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return ``CE(A, y)``."""
        return cross_entropy(self.mixed(logits, x), labels)


GATES: dict[str, type[Experts]] = {"pixels": ByPixels, "predictions": ByPredictions}


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**settings.QUICK_GENERATOR},
    "published-code": {"perturbation_size": 8.0},
}


@config_class("intactofl")
class IntactOflConfig(PoolOptions, SynthesisOptions):
    """Options of IntactOFL; the generator's are the other methods'."""

    epochs: int = shared("epochs", 200)
    steps_per_epoch: int = shared("steps_per_epoch", 0)
    batch_size: int = shared("batch_size", 128)
    gate: str = option(
        "pixels",
        "the gate's input: the pixels as published, or the experts' predictions",
        choices=tuple(GATES),
        main=True,
    )
    gate_lr: float = option(
        0.0, "learning rate of the gate; 0: 0.01 by SGD on pixels, 0.001 by Adam on predictions", low=0.0,
        setting=False,
    )  # fmt: skip
    perturbation_size: float = option(
        8 / 255, "how far images are moved before the gate on pixels sees them, in normalised pixels", above=0.0
    )
    bn_weight: float = option(1.0, "weight of the batch-normalisation loss", low=0.0, setting=False)
    distinct_weight: float = option(
        1.0,
        "weight of the disagreement between gate and plain mean, or with a gate on predictions among experts",
        low=0.0,
        setting=False,
    )
    teacher_precision: str = shared("teacher_precision", "float32")

    preset = presets(PRESETS)


def fit(job: Job, progress: Progress) -> Outcome:
    """Make images and train the gate on them, epoch by epoch; the result is the ensemble under the last gate."""
    server = IntactOflServer(job, progress)
    outcome = run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)
    ensemble = EnsembleSpec.of(job, server.experts.combiner, outcome.student)
    return replace(outcome, student=None, ensemble=ensemble)


class IntactOflServer:
    """The state of one run of IntactOFL, and the steps of an epoch."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: IntactOflConfig = job.config
        self.job, self.config, self.progress = job, config, progress
        # The terms look at every expert by itself: nothing combines the logits [M, B, C].
        folds, precision = not reads_statistics(job, config.bn_weight), config.teacher_precision
        self.members = Ensemble.of_job(job, job.uploads, nn.Identity(), fold=folds, precision=precision)
        if config.bn_weight:
            note_without_statistics(self.members.members, progress)
        form = GATES[config.gate]
        self.experts = form(self.members, form.start(job)).to(job.device)
        self.lr = config.gate_lr or self.experts.lr
        self.images = GeneratedImages(
            job, config.recipe(), latent=config.latent, batch_size=config.synthesis_batch_size
        )
        self.standardize = Standardize(job.normalization).to(job.device)
        self._answer = Graphed(self._answered, job.device, capture=self.members.is_local)
        self._move = Graphed(self._moved, job.device, capture=self.members.is_local)
        self._step = Graphed(self._stepped, job.device)
        pool = Pool(config.pool_cap, job.device)
        optimizer = self.experts.optimizer(self.lr)
        self.stage = Stage({"student": self.experts}, optimizer, pool, config.synthesis_batch_size, job.store_images)

    def epoch(self, epoch: int) -> dict[str, float]:
        """One epoch: make images, remember them, train the gate on all."""
        tick = self.stage.ticks(self.progress, epoch, self.config.epochs)
        with self.stage.clock("synthesis"):
            batch = self.synthesize(epoch, tick)
        with self.stage.clock("gate"):
            self.stage.pool.add(**self.remembered(batch))
            return {**batch.losses, "gate": self.learn(epoch, tick)}

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> Batch:
        """Make the images of an epoch: of their class, with the statistics of training, and hard in the gate's way."""
        config = self.config
        with batchnorm_loss(self.members.members if config.bn_weight else ()) as bn_loss:
            right, distinct = self.experts.terms(config.distinct_weight)
            statistics = Term("bn", config.bn_weight, lambda _: bn_loss())
            return self.images.batch(
                epoch,
                self.members,
                None,
                terms=[right, statistics, distinct],
                sort_labels=self.experts.sort_labels,
                tick=tick,
            )

    @torch.no_grad()
    def remembered(self, batch: Batch) -> dict[str, Tensor]:
        """Return the pool's rows for new images; of images read unchanged the experts' logits stay the same."""
        rows = self.config.stored(batch.images, batch.labels)
        if self.config.gate == "predictions" and self.config.pool_augmentation == "none":
            parts = torch.split(rows["images"], self.config.batch_size)
            logits = torch.cat([self.members(self.standardize(dequantize(part))) for part in parts], dim=1)
            rows["members"] = logits.transpose(0, 1)
        return rows

    def learn(self, epoch: int, tick: Callable[[], None]) -> float:
        """Pass once over the pool, one step of the gate per batch; return the mean of its loss."""
        config, losses = self.config, []
        rng, augment = generator(self.job.seed, "gate", epoch), AUGMENTATIONS[config.pool_augmentation]
        set_rate(self.stage.optimizer, learning_rate(self.experts.schedule, self.lr, epoch, config.epochs))
        for rows in shuffled_batches(self.stage.pool.columns, config.batch_size, rng, most=config.steps_per_epoch):
            inputs = self.standardize(augment(dequantize(rows["images"]), rng))
            if self.experts.moves:
                directions = draw_directions(len(inputs), self.job.num_classes, rng)
                inputs = self._move(inputs, directions.to(inputs.device))
            logits = rows["members"].transpose(0, 1) if "members" in rows else self._answer(inputs)
            losses.append(self._step(logits, inputs, rows["labels"]))
            work().student_steps += 1
            tick()
        return float(torch.stack(losses).mean())

    def _moved(self, inputs: Tensor, directions: Tensor) -> Tensor:
        return self.experts.moved(inputs, self.config.perturbation_size, directions)

    @torch.no_grad()
    def _answered(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.members(inputs)
        return logits

    def _stepped(self, logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = self.experts.loss(logits, inputs, labels)
        return take_step(loss, self.experts, self.stage.optimizer, clip=self.experts.clip)


METHOD = Method(
    name="intactofl",
    title="IntactOFL",
    source="Zeng et al., ACM MM 2024",
    config=IntactOflConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR, Need.IMAGE_GRADIENTS}),
    kind="ensemble",
    plan=Always(Plan(random=True)),
)
