"""DENSE (FedSyn): the server makes images the uploaded models agree on and distils their ensemble into one model.

Paper: Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022,
    https://arxiv.org/abs/2112.12371 (first called FedSyn). Read version: the NeurIPS one, and the authors' code.
Symbols: D(x) -> teacher, the mean of logits; f_S -> student; G -> generator; T -> epochs; T_G -> generator_steps;
    b -> batch_size; lambda_1 -> bn_weight; lambda_2 -> adversarial_weight; eta_G, eta_S -> generator_lr, student_lr.
Where: similarity l_CE -> losses.cross_entropy; stability l_BN -> batchnorm; transferability l_div with the mask of
    Eq. (6) -> losses.adversarial_divergence; l_dis -> losses.soft_kl; Algorithm 1 -> _Server.epoch.
Deviations: l_BN uses the running statistics of the clients' own layers (the paper speaks of the generator's, which
    have nothing to be compared with; the published code never collects any). By default the student learns from all
    images made so far, as in the published code; Algorithm 1 uses the newest batch only: preset "paper". What the
    paper leaves open follows the code: the generator starts anew every epoch, and of its steps the images of the
    lowest loss are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .distillation.augment import AUGMENTATIONS, Standardize
from .distillation.batchnorm import batchnorm_loss
from .distillation.combiners import Mean
from .distillation.distill import distill
from .distillation.ensemble import Ensemble, fast_layout
from .distillation.epochs import Stage, learning_rate, run_epochs, weights_of
from .distillation.generators import DenseGenerator
from .distillation.losses import adversarial_divergence, cross_entropy
from .distillation.pool import Pool, dequantize, quantize, shuffled_batches
from .distillation.synthesis import Recipe, Term, View, frozen, synthesize
from .errors import OptionError
from .method import Method, Need, Outcome
from .options import check, option
from .outcomes import fresh_student
from .seeds import generator, seeded_torch

if TYPE_CHECKING:
    from .method import Job, Progress

_AUGMENTATIONS = tuple(AUGMENTATIONS)
_SHOWN = 64  # images in the report


@dataclass(frozen=True)
class DenseConfig:
    """Options of DENSE; the defaults are the paper's values with the published code's pool."""

    rounds: int = option(1, "times the whole line of local training and server stage runs (Table 5)", low=1)
    epochs: int = option(200, "server epochs T", low=1)
    generator_steps: int = option(30, "generator steps per epoch T_G", low=1)
    generator_lr: float = option(1e-3, "Adam's learning rate of the generator eta_G", above=0.0)
    generator_clip: float = option(0.0, "largest norm of the generator's gradient; 0: no limit", low=0.0)
    generator_reset: bool = option(True, "the generator starts anew every epoch")
    generator_precision: str = option(
        "float32", "arithmetic of the generator: bfloat16 halves its time", choices=("float32", "bfloat16")
    )
    latent: int = option(256, "length of the noise vector z", low=1)
    optimize_noise: bool = option(True, "the noise is optimised together with the generator")
    synthesis_batch_size: int = option(128, "images made per epoch", low=2)
    keep_images: str = option(
        "best", "images kept: of the generator's lowest loss, or its last", choices=("best", "last")
    )
    synthesis_augmentation: str = option(
        "none", "change of images before the models, in synthesis", choices=_AUGMENTATIONS
    )
    ce_weight: float = option(1.0, "weight of the cross-entropy l_CE", low=0.0)
    bn_weight: float = option(1.0, "weight of the batch-normalisation loss lambda_1", low=0.0)
    adversarial_weight: float = option(0.5, "weight of the disagreement loss lambda_2", low=0.0)
    adversarial_temperature: float = option(1.0, "its temperature, with the square as a factor", above=0.0)
    distillation_data: str = option(
        "pool", "the student learns from all images so far, or the newest", choices=("pool", "fresh")
    )
    pool_cap: int = option(0, "most images in the pool, the oldest leave first; 0: no limit", low=0)
    pool_augmentation: str = option(
        "none", "change of images before the models, in distillation", choices=_AUGMENTATIONS
    )
    steps_per_epoch: int = option(0, "most student steps per epoch; 0: one pass over all images", low=0)
    batch_size: int = option(128, "images per student step b", low=2)
    kd_temperature: float = option(1.0, "temperature of the distillation loss", above=0.0)
    student_lr: float = option(0.01, "learning rate of the student eta_S", above=0.0)
    momentum: float = option(0.9, "its momentum", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "its weight decay", low=0.0)
    schedule: str = option("constant", "its learning rate over the epochs", choices=("constant", "cosine"))
    student_clip: float = option(0.0, "largest norm of the student's gradient; 0: no limit", low=0.0)

    def __post_init__(self) -> None:
        check(self, "dense")
        if self.pool_cap == 1:
            raise OptionError("setting 'dense.pool-cap' is 1: allowed is 0 or a whole number at least 2")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DenseConfig:
        """Return the settings of a publication, with some changes.

        Args:
            name: ``"default"``; ``"paper"`` (the text of DENSE); ``"published-code"`` (its release on CIFAR; on other
                data sets its pool augmentation is ``"flip"``); ``"co-boosting"`` (the DENSE
                baseline of that paper on CIFAR; on other data sets its pool augmentation is ``"none"``).
            **changes: Fields to set otherwise.

        Raises:
            OptionError: The name is unknown or a change is out of range.
        """
        if name not in PRESETS:
            raise OptionError(f"unknown preset {name!r} of dense: known are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"distillation_data": "fresh", "keep_images": "last", "optimize_noise": False},
    "published-code": {
        "adversarial_weight": 1.0,
        "bn_weight": 0.0,
        "student_lr": 0.005,
        "batch_size": 256,
        "synthesis_batch_size": 256,
        "kd_temperature": 20.0,
        "synthesis_augmentation": "crop-flip",
        "pool_augmentation": "crop-flip",
    },
    "co-boosting": {
        "epochs": 500,
        "adversarial_weight": 1.0,
        "adversarial_temperature": 3.0,
        "bn_weight": 0.0,
        "kd_temperature": 4.0,
        "weight_decay": 1e-4,
        "schedule": "cosine",
        "generator_clip": 10.0,
        "student_clip": 10.0,
        "pool_augmentation": "crop-flip",
    },
}


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs of synthesis and distillation; the result is the last epoch's student."""
    server = _Server(job, progress)
    run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)
    images = server.stage.pool.columns["images"]
    shown = images[
        torch.linspace(max(0, len(images) - job.config.synthesis_batch_size), len(images) - 1, _SHOWN).long()
    ]
    return Outcome(student=weights_of(server.student), timings=server.stage.seconds, images=shown.cpu())


class _Server:
    """The models of one run of DENSE, and what an epoch does with them."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: DenseConfig = job.config
        self.job, self.progress, self.config = job, progress, config
        self.teacher = Ensemble.from_uploads(job.uploads, job.builders, Mean(), device=job.device)
        self.student = fast_layout(fresh_student(job))
        with seeded_torch(job.seed, "generator"):  # its initialisation draws from torch's global state
            self.generator = fast_layout(DenseGenerator(config.latent, job.input_shape).to(job.device))
        self.generator.reset(generator(job.seed, "generator"))
        self.standardize = Standardize(job.normalization).to(job.device)
        optimizer = torch.optim.SGD(
            self.student.parameters(), config.student_lr, config.momentum, weight_decay=config.weight_decay
        )
        # In "fresh" mode the pool only remembers the newest images, for the report.
        fresh = config.distillation_data == "fresh"
        pool = Pool(config.synthesis_batch_size if fresh else config.pool_cap, job.device)
        modules = {"student": self.student} | ({} if config.generator_reset else {"generator": self.generator})
        self.stage = Stage(modules, optimizer, pool)

    def epoch(self, epoch: int) -> dict[str, float]:
        """Algorithm 1, one epoch: make images, remember them, distil."""
        tick = partial(self.progress.report, epoch, self.config.epochs)
        with self.stage.clock("synthesis"):
            images, labels, losses = self.synthesize(epoch, tick)
        with self.stage.clock("distillation"):
            newest = self.remember(images, labels)
            table = newest if self.config.distillation_data == "fresh" else self.stage.pool.columns
            for group in self.stage.optimizer.param_groups:
                group["lr"] = learning_rate(self.config.schedule, self.config.student_lr, epoch, self.config.epochs)
            losses["distillation"] = distill(
                self.student,
                self.batches(table, epoch),
                self.stage.optimizer,
                temperature=self.config.kd_temperature,
                clip=self.config.student_clip,
                tick=tick,
            )
        return losses

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return new images [b, ch, H, W] in [0, 1], their intended labels [b] and the generator's losses."""
        config, device, seed = self.config, self.job.device, self.job.seed
        rng = generator(seed, "synthesis", epoch)
        if config.generator_reset:
            self.generator.reset(rng)
        noise = torch.randn(config.synthesis_batch_size, config.latent, generator=rng).to(device)
        # Sorted, as in the published code: the labels of a batch are a set, its order carries nothing.
        labels = torch.randint(self.job.num_classes, (len(noise),), generator=rng).sort().values.to(device)
        augment = AUGMENTATIONS[config.synthesis_augmentation]
        watched = self.teacher.members if config.bn_weight else ()
        with frozen(self.student), batchnorm_loss(watched) as bn_loss:

            def look(images: Tensor) -> View:
                inputs = self.standardize(augment(images, rng))
                student = self.student(inputs) if config.adversarial_weight else None
                return View(images, inputs, labels, self.teacher(inputs), student)

            images, losses = synthesize(
                self.generator,
                noise,
                look,
                terms=[
                    Term("ce", config.ce_weight, lambda view: cross_entropy(view.teacher, view.labels)),
                    Term("bn", config.bn_weight, lambda _: bn_loss()),
                    Term("adversarial", config.adversarial_weight, self.disagreement),
                ],
                recipe=Recipe(
                    steps=config.generator_steps,
                    lr=config.generator_lr,
                    clip=config.generator_clip,
                    optimize_noise=config.optimize_noise,
                    keep=config.keep_images,
                    precision=config.generator_precision,
                ),
                tick=tick,
            )
        return images, labels, losses

    def disagreement(self, view: View) -> Tensor:
        """Return l_div, Eq. (6)."""
        assert view.student is not None  # noqa: S101  computed whenever this term has a weight
        return adversarial_divergence(view.teacher, view.student, self.config.adversarial_temperature)

    @torch.no_grad()
    def remember(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add images to the pool, in 8 bits; return the rows the student would learn from in "fresh" mode.

        Images that are read unchanged have the same teacher logits for ever: they are computed here, once.
        """
        stored = {"images": quantize(images), "labels": labels}
        newest = {"images": images, "labels": labels}
        if self.config.pool_augmentation == "none":
            for rows in (stored, newest):
                rows["logits"] = self.teacher(self.standardize(dequantize(rows["images"])))
        self.stage.pool.add(**stored)
        return newest

    @torch.no_grad()
    def batches(self, table: dict[str, Tensor], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images [B, ch, H, W] and the teacher's logits [B, C]."""
        rng = generator(self.job.seed, "distillation", epoch)
        augment = AUGMENTATIONS[self.config.pool_augmentation]
        for rows in shuffled_batches(table, self.config.batch_size, rng, most=self.config.steps_per_epoch):
            inputs = self.standardize(augment(dequantize(rows["images"]), rng))
            yield inputs, rows["logits"] if "logits" in rows else self.teacher(inputs)


METHOD = Method(
    name="dense",
    title="DENSE",
    source="Zhang et al., NeurIPS 2022",
    config=DenseConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR}),
)
