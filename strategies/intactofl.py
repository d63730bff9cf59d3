"""IntactOFL: the uploaded models stay as they are, as experts; a gate over them learns from synthetic images.

Paper: Zeng, Xu, Zhou, Wu, Kang, Cai, Niyato, One-shot-but-not-degraded Federated Learning, ACM MM 2024,
    https://doi.org/10.1145/3664647.3680715. Read version: the abstract, and the authors' code.
Symbols: f_k(x) -> logits of member k; e(x) -> their plain mean; A(x) -> the mixture (1/M) sum_k g_k(x) f_k(x);
    g(x) = V x + b -> expert_gate.pixel_gate; T -> epochs; eps -> perturbation_size.
Where: the generator's loss, CE(A, y), the statistics, and the disagreement of A with e -> experts.ByPixels.terms;
    images moved by eps -> perturbation.prediction_gradient; the gate's loss -> experts.ByPixels.loss.
Deviations: of the paper only the abstract was read; all formulas are those of its code. There eps is 8 in normalised
    pixels, which leaves only signs of an image. The default is 8/255, as in the same authors' copy of Co-Boosting;
    preset "published-code" has 8. The published clients freeze batch normalisation after an epoch and hold
    overlapping parts of the data; here clients train as for any method.
Another gate: with ``gate = "predictions"`` it is this library's own. It is linear in the experts' predictions, the
    mixture is one of probabilities, the images are those that experts disagree on, and nothing moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .core.gpu import Graphed, set_rate
from .core.options import Always, check, option, presets
from .core.seeds import generator
from .core.work import work
from .distillation import settings
from .distillation.distill import stepped
from .distillation.epochs import Stage, learning_rate, run_epochs
from .distillation.experts import GATES
from .distillation.generated import GeneratedImages
from .distillation.perturbation import drawn_directions
from .distillation.pool import Pool, shuffled_batches
from .distillation.settings import PRECISIONS, PoolOptions, SynthesisOptions
from .distillation.synthesis import Batch, Term
from .method import EnsembleSpec, Method, Need, Outcome
from .teacher.augment import AUGMENTATIONS, Standardize, dequantize
from .teacher.batchnorm import batchnorm_loss, note_without_statistics, reads_statistics
from .teacher.ensemble import Ensemble

if TYPE_CHECKING:
    from .method import Job, Progress

PRESETS: dict[str, dict[str, Any]] = {"default": {}, "published-code": {"perturbation_size": 8.0}}


@dataclass(frozen=True)
class IntactOflConfig(PoolOptions, SynthesisOptions):
    """Options of IntactOFL; the generator's are the other methods'."""

    epochs: int = option(200, "server epochs T", low=1, scaled=True)
    steps_per_epoch: int = option(0, "most batches per epoch that the gate sees; 0: one pass over all images", low=0)
    batch_size: int = option(128, "images per step of the gate", low=2)
    gate: str = option(
        "pixels",
        "the gate's input: the pixels as published, or the experts' predictions",
        choices=tuple(GATES),
    )
    gate_lr: float = option(
        0.0, "learning rate of the gate; 0: 0.01 by SGD on pixels, 0.001 by Adam on predictions", low=0.0
    )
    perturbation_size: float = option(
        8 / 255, "how far images are moved before the gate on pixels sees them, in normalised pixels", above=0.0
    )
    bn_weight: float = option(1.0, "weight of the batch-normalisation loss", low=0.0)
    distinct_weight: float = option(
        1.0,
        "weight of the disagreement between gate and plain mean, or with a gate on predictions among experts",
        low=0.0,
    )
    teacher_precision: str = option(
        "float32", "arithmetic of the uploaded models: bfloat16 halves their time", choices=PRECISIONS
    )

    preset = presets(PRESETS)

    def __post_init__(self) -> None:
        check(self, "intactofl")
        settings.check_pool(self, "intactofl")


def fit(job: Job, progress: Progress) -> Outcome:
    """Make images and train the gate on them, epoch by epoch; the result is the ensemble under the last gate."""
    server = _Server(job, progress)
    outcome = run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)
    clients = tuple(upload.client for upload in job.uploads)
    return replace(
        outcome, student=None, ensemble=EnsembleSpec(clients, server.experts.combiner, outcome.student or {})
    )


class _Server:
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
        self.stage = Stage({"student": self.experts}, optimizer, pool, made=config.synthesis_batch_size)

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
                directions = drawn_directions(len(inputs), self.job.num_classes, rng)
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
        return stepped(loss, self.experts, self.stage.optimizer, clip=self.experts.clip)


METHOD = Method(
    name="intactofl",
    title="IntactOFL",
    source="Zeng et al., ACM MM 2024",
    config=IntactOflConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR, Need.IMAGE_GRADIENTS}),
    kind="ensemble",
    draws=Always(True),
)
