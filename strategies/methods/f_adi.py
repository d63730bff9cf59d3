"""F-ADI: adaptive inversion (DeepInversion) of the ensemble of the uploaded models; no generator, pixels are optimised.

Paper: Yin, Molchanov, Alvarez, Li, Mallya, Hoiem, Jha, Kautz, Dreaming to Distill: Data-Free Knowledge Transfer via
    DeepInversion, CVPR 2020, https://arxiv.org/abs/1912.08795; brought to one-shot federated learning as a baseline
    of DENSE and Co-Boosting. Read version: a summary of the paper and of its code.
Symbols: A(x) -> teacher, the mean of logits; x -> pixels, in the models' normalised input space; alpha_tv -> tv_weight;
    alpha_f -> bn_weight; alpha_c -> competition_weight.
Where: R_prior, Eq. (3) -> losses.total_variation; R_feature, Eq. (4) -> batchnorm; R_compete, Eq. (8) ->
    losses.jensen_shannon; the sum, Eq. (10) -> FAdiServer.synthesize.
Deviations: the papers that compare with it publish neither the length nor the rate of their inversion. Every server
    epoch inverts one batch, for as many steps as the other methods train their generator. Rate 0.1 with alpha_tv = 1e-3
    is the better setting of the published code; it has alpha_l2 = 0, so that R_prior has no norm of the images. The
    batch-normalisation statistics are those of every client's own layers, averaged over the clients; without such
    layers only the prior is left. The images kept are those of the lowest loss, as the published code intends; it keeps
    an alias of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.options import config_class, option, presets
from ..core.seeds import generator
from ..distillation import settings
from ..distillation.epochs import Stage
from ..distillation.inverted import Pixels
from ..distillation.learner import Learner, build_teacher, learn_from_made
from ..distillation.losses import cross_entropy, jensen_shannon, total_variation
from ..distillation.pool import Pool
from ..distillation.settings import PoolOptions, StudentOptions, shared
from ..distillation.synthesis import Batch, Recipe, Term, View, synthesize
from ..method import ENSEMBLES, Job, Method, Need, Outcome, Progress
from ..teacher.augment import jitter
from ..teacher.batchnorm import batchnorm_loss, note_without_statistics, reads_statistics
from ..teacher.student import frozen

JITTER = 2  # the most pixels that the images roll before each step, as in the published code
COMPETITION_TEMPERATURE = 3.0  # temperature of the two predictions in R_compete, as in the published code


# "fedsyn": the row of DENSE's paper.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**settings.QUICK_TEACHER, "epochs": 12, "inversion_steps": 20, "batch_size": 32},
    "fedsyn": {
        "epochs": 200, "kd_temperature": 1.0, "weight_decay": 0.0, "schedule": "constant", "student_clip": 0.0,
    },
}  # fmt: skip


@config_class("f-adi")
class FAdiConfig(StudentOptions, PoolOptions):
    """Options of F-ADI; the shared ones are Co-Boosting's, the others DeepInversion's on CIFAR-10."""

    inversion_steps: int = option(30, "steps per epoch on one batch of pixels", low=1, setting=False)
    inversion_lr: float = option(0.1, "Adam's learning rate of the pixels", above=0.0, setting=False)
    synthesis_batch_size: int = shared("synthesis_batch_size", 128)
    tv_weight: float = option(1e-3, "weight alpha_tv of the total variation", low=0.0, setting=False)
    bn_weight: float = option(10.0, "weight alpha_f of the batch-normalisation loss", low=0.0, setting=False)
    competition_weight: float = option(
        10.0, "weight alpha_c of the competition with the student", low=0.0, setting=False
    )

    preset = presets(PRESETS)


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs of inversion and distillation; the result is the last epoch's student."""
    server = FAdiServer(job, progress)
    return learn_from_made(job, progress, server.stage, server.learner, make=server.synthesize, options=job.config)


class FAdiServer:
    """The state of one run of F-ADI."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: FAdiConfig = job.config
        self.job, self.config, self.progress = job, config, progress
        self.teacher = build_teacher(
            job, precision=config.teacher_precision, watched=reads_statistics(job, config.bn_weight)
        )
        if config.bn_weight:
            note_without_statistics(self.teacher.members, progress)
        self.learner = Learner(job, self.teacher, config.distill_recipe(), augmentation=config.pool_augmentation)
        modules, pool = {"student": self.learner.student}, Pool(config.pool_cap, job.device)
        self.stage = Stage(modules, self.learner.optimizer, pool, config.synthesis_batch_size, job.store_images)

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> Batch:
        """Invert the images of an epoch, Eq. (10)."""
        config, student = self.config, self.learner.student
        rng = generator(self.job.seed, "synthesis", epoch)
        start = torch.randn((config.synthesis_batch_size, *self.job.input_shape), generator=rng)
        labels = torch.randint(self.job.num_classes, (len(start),), generator=rng).to(self.job.device)
        watched = self.teacher.members if config.bn_weight else ()
        with frozen(student), batchnorm_loss(watched) as bn_loss:

            def look(images: Tensor) -> View:
                inputs = jitter(images, JITTER, rng)
                seen = student(inputs) if config.competition_weight else None
                return View(images, inputs, labels, self.teacher(inputs), seen)

            pixels = Pixels(start.to(self.job.device))
            inverted, losses = synthesize(
                pixels,
                start.new_empty(0),
                look,
                terms=[
                    Term("ce", 1.0, lambda view: cross_entropy(view.teacher, view.labels)),
                    Term("tv", config.tv_weight, lambda view: total_variation(view.inputs)),
                    Term("bn", config.bn_weight, lambda _: bn_loss()),
                    Term("competition", config.competition_weight, self.competition),
                ],
                recipe=Recipe(
                    steps=config.inversion_steps,
                    lr=config.inversion_lr,
                    betas=(0.9, 0.999),
                    optimize_noise=False,
                ),
                tick=tick,
            )
        return Batch(self.learner.standardize.inverse(inverted).clamp(0, 1), labels, losses)

    def competition(self, view: View) -> Tensor:
        """Return R_compete, Eq. (8): small where student and teacher disagree."""
        assert view.student is not None  # noqa: S101  computed whenever this term has a weight
        return 1 - jensen_shannon(view.student, view.teacher, COMPETITION_TEMPERATURE).clamp(0, 1)


METHOD = Method(
    name="f-adi",
    title="F-ADI",
    source="Yin et al., CVPR 2020, as in Zhang et al., NeurIPS 2022",
    config=FAdiConfig,
    fit=fit,
    needs=frozenset({Need.IMAGES, Need.IMAGE_GRADIENTS}),
    teachers=ENSEMBLES,
)
