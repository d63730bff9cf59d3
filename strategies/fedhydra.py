"""In the spirit of FedHydra: a client's weight for a class is how well its model guides a generator to that class.

Paper: Bai, Song, Wu, Sajjanhar, Xiang, Zhou, Tao, Li, Li, A Unified Solution to Diverse Heterogeneities in One-Shot
    Federated Learning, https://arxiv.org/abs/2410.21119. Read version: the abstracts of arXiv v1 to v3, the beginning
    of the introduction and a summary; no formula and no code.
Symbols: f_k -> member k; l_k^c(t) -> the mean cross-entropy of f_k on its images of class c at generator step t;
    s_k^c = exp(-min_t l_k^c(t)), the guiding score; its shares over the clients, U_k^c = s_k^c / sum_j s_j^c, and over
    a client's classes, V_k^c = s_k^c / sum_d s_k^d -> stratified, the weights of LabelCount.
Where: model stratification -> guiding_losses, stratified; stratified aggregation sum_k U_k^c f_k(x)_c ->
    combiners.LabelCount; the generator and the distillation -> dense.Server.
Deviations: the two stages are the paper's, the formulas above are this library's. It is not known here how the paper
    scores a model's guidance, with how many images, and where each normalisation enters. A score is the model's
    geometric mean probability of the class where the generator came closest. One generator makes several classes side
    by side, as many as fit a batch. The settings outside the stratification are DENSE's. Until an equation can be
    read, this is no reproduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .combiners.combiners import LabelCount
from .core.options import check, option
from .core.seeds import generator, seeded_torch
from .dense import DenseStageOptions, Server
from .distillation import settings
from .distillation.epochs import run_epochs, weights_of
from .distillation.generators import DenseGenerator
from .distillation.synthesis import Term, View, synthesize
from .method import EnsembleSpec, Method, Need, Outcome
from .teacher.augment import Standardize
from .teacher.batchnorm import reads_statistics
from .teacher.ensemble import Ensemble

if TYPE_CHECKING:
    from .method import Job, Progress


NORMALISATIONS = ("clients", "classes", "both")


@dataclass(frozen=True)
class FedHydraConfig(DenseStageOptions):
    """Options of FedHydra: DENSE's, and those of the model stratification."""

    stratification_steps: int = option(30, "generator steps in which a client's model guides it to a class", low=1)
    stratification_images: int = option(16, "images of each class made for a client's model", low=2)
    normalise: str = option(
        "clients", "shares of a model's scores: over the clients, over its classes, or both", choices=NORMALISATIONS
    )

    def __post_init__(self) -> None:
        check(self, "fedhydra")
        settings.check_pool(self, "fedhydra")


def fit(job: Job, progress: Progress) -> Outcome:
    """Stratify the models, then run DENSE's epochs with them; the results are the student and the ensemble."""
    config: FedHydraConfig = job.config
    combiner = LabelCount(torch.ones(len(job.uploads), job.num_classes))
    folds, precision = not reads_statistics(job, config.bn_weight), config.teacher_precision
    teacher = Ensemble.of_job(job, job.uploads, combiner, fold=folds, precision=precision)
    server = Server(job, progress, teacher)
    server.stage.modules["weights"] = combiner

    def epoch(number: int) -> dict[str, float]:
        if number == 0:  # later rounds find the weights in the checkpoint
            with server.stage.clock("stratification"):
                losses = guiding_losses(job, teacher, tick=partial(progress.report, 0, config.epochs))
                combiner.weights.copy_(stratified(losses, config.normalise))
        return server.epoch(number)

    outcome = run_epochs(job, progress, server.stage, epochs=config.epochs, step=epoch)
    clients = tuple(upload.client for upload in job.uploads)
    return replace(outcome, ensemble=EnsembleSpec(clients, "label-count", weights_of(combiner)))


def stratified(losses: Tensor, normalise: str = "clients") -> Tensor:
    """Return the weights [M, C] of least guiding losses ``-log s`` [M, C]; over the clients they add up to one.

    Args:
        losses: Numbers >= 0.
        normalise: ``"clients"``: U. ``"classes"``: V. ``"both"``: the product U V. LabelCount divides the latter two
            by their sums over the clients, and so does this.
    """
    over_clients, over_classes = torch.log_softmax(-losses, dim=0), torch.log_softmax(-losses, dim=1)
    if normalise == "clients":
        return torch.softmax(-losses, dim=0)
    return torch.softmax(over_classes if normalise == "classes" else over_clients + over_classes, dim=0)


def guiding_losses(job: Job, teacher: Ensemble, *, tick: Callable[[], None] = lambda: None) -> Tensor:
    """Return ``min_t l_k^c(t)`` [M, C]: how close each model alone brings a generator to each class.

    Args:
        job: Its image shape, number of classes, seed and device are used.
        teacher: Each member guides a generator of its own.
        tick: Called after each generator step.
    """
    with seeded_torch(job.seed, "stratification"):
        maker = DenseGenerator(job.config.latent, job.input_shape).to(job.device)
    rows = [
        torch.cat([_guided(job, teacher, maker, (member, classes), tick) for classes in _groups(job)])
        for member in range(len(teacher.members))
    ]
    return torch.stack(rows)


def _groups(job: Job) -> Iterator[range]:
    """Yield the classes that one generator makes side by side."""
    config: FedHydraConfig = job.config
    most = max(1, config.synthesis_batch_size // config.stratification_images)
    size = math.ceil(job.num_classes / math.ceil(job.num_classes / most))
    for first in range(0, job.num_classes, size):
        yield range(first, min(first + size, job.num_classes))


def _guided(
    job: Job, teacher: Ensemble, maker: DenseGenerator, task: tuple[int, range], tick: Callable[[], None]
) -> Tensor:
    """Train a fresh generator against one member; return the least loss of each of some classes."""
    config: FedHydraConfig = job.config
    member, classes = task
    rng = generator(job.seed, "stratification", job.uploads[member].client, classes.start)
    maker.reset(rng)
    noise = torch.randn(len(classes) * config.stratification_images, config.latent, generator=rng).to(job.device)
    labels = torch.tensor(classes).repeat_interleave(config.stratification_images).to(job.device)
    standardize = Standardize(job.normalization).to(job.device)
    least = torch.full((len(classes),), math.inf, device=job.device)

    def look(images: Tensor) -> View:
        inputs = standardize(images)
        return View(images, inputs, labels, teacher.member_logits(inputs, slice(member, member + 1))[0])

    def loss(view: View) -> Tensor:
        each = F.cross_entropy(view.teacher, view.labels, reduction="none").view(len(classes), -1).mean(1)
        torch.minimum(least, each.detach(), out=least)
        return each.mean()

    recipe = replace(config.recipe(), steps=config.stratification_steps)
    synthesize(maker, noise, look, terms=[Term("guidance", 1.0, loss)], recipe=recipe, tick=tick)
    return least


METHOD = Method(
    name="fedhydra",
    title="In the spirit of FedHydra",
    source="Bai et al., KDD 2025",
    config=FedHydraConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR, Need.IMAGE_GRADIENTS}),
)
