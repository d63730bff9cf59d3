"""IntactOFL: the uploaded models stay as they are, as experts; a gate over them learns from synthetic images.

Paper: Zeng, Xu, Zhou, Wu, Kang, Cai, Niyato, One-shot-but-not-degraded Federated Learning, ACM MM 2024,
    https://doi.org/10.1145/3664647.3680715. Read version: the abstract; of the published code no
    more than that the gate learns from images that were perturbed.
Symbols: f_k -> member k; y -> the class an image was made for; JS -> expert_divergence; g -> the gate's softmax.
Where: "approximating underlying distributions of local data" -> the terms ce, mean_k CE(f_k(x), y), and bn; "making
    distinct predictions among experts" -> the term distinct, -JS(f_1(x), ..., f_M(x)); "self-supervised training" of
    the mixture, CE(log sum_k g_k sm(f_k(x)), y) -> _Server.learn; the mixture -> combiners.expert_gate.
Deviations: the abstract gives no formula; those above are this library's reading of it. The generator, its settings and
    the pool are those of the other data-free methods. How the paper's gate looks is not known here: by default it is
    linear in the experts' predictions, which carries over from synthetic to real images; with ``gate = "image"`` it is
    the convolutional one of FENS, which mixes logits. Images are not perturbed before the gate learns from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .combiners.expert_gate import expert_divergence, expert_mixture
from .combiners.gate import mixture, start_gate
from .core.options import check, option
from .core.seeds import generator
from .distillation import settings
from .distillation.epochs import Stage, run_epochs
from .distillation.generated import GeneratedImages
from .distillation.losses import cross_entropy
from .distillation.pool import Pool, shuffled_batches
from .distillation.settings import PRECISIONS, PoolOptions, SynthesisOptions
from .distillation.synthesis import Batch, Term, View
from .method import EnsembleSpec, Method, Need, Outcome
from .teacher.augment import AUGMENTATIONS, Standardize, dequantize
from .teacher.batchnorm import batchnorm_loss, note_without_statistics
from .teacher.ensemble import Ensemble

if TYPE_CHECKING:
    from .method import Job, Progress, State

GATES = {"predictions": "expert-gate", "image": "moe"}  # form -> combiner


@dataclass(frozen=True)
class IntactOflConfig(PoolOptions, SynthesisOptions):
    """Options of IntactOFL; the generator's are the other methods'."""

    epochs: int = option(200, "server epochs T", low=1, scaled=True)
    steps_per_epoch: int = option(0, "most batches per epoch that the gate sees; 0: one pass over all images", low=0)
    batch_size: int = option(128, "images per step of the gate", low=2)
    gate: str = option("predictions", "the gate's input", choices=tuple(GATES))
    gate_lr: float = option(1e-3, "Adam's learning rate of the gate", above=0.0)
    bn_weight: float = option(1.0, "weight of the batch-normalisation loss", low=0.0)
    distinct_weight: float = option(1.0, "weight of the divergence among the experts' predictions", low=0.0)
    teacher_precision: str = option(
        "float32", "arithmetic of the uploaded models: bfloat16 halves their time", choices=PRECISIONS
    )

    def __post_init__(self) -> None:
        check(self, "intactofl")
        settings.check_pool(self, "intactofl")


def check_job(job: Job) -> None:
    """Refuse images that the gate cannot look at.

    Raises:
        OptionError: They are too small.
    """
    _start(job)


def fit(job: Job, progress: Progress) -> Outcome:
    """Make images and train the gate on them, epoch by epoch; the result is the ensemble under the last gate."""
    server = _Server(job, progress)
    outcome = run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)
    clients = tuple(upload.client for upload in job.uploads)
    return replace(outcome, student=None, ensemble=EnsembleSpec(clients, GATES[job.config.gate], outcome.student or {}))


class _Experts(nn.Module):
    """The experts under a gate; the gate alone is trained, and is all that the module's state holds."""

    def __init__(self, members: Ensemble, form: str, weights: State) -> None:
        super().__init__()
        self._members, self._form = (members,), form  # in a tuple it is no part of this module
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value))

    def mixed(self, logits: Tensor, x: Tensor) -> Tensor:
        """Return the mixture's logits [B, C] for the experts' [M, B, C] on normalised images x [B, ch, H, W]."""
        weights = dict(self.named_parameters())
        if self._form == "predictions":
            return expert_mixture(weights, logits)
        return mixture(weights, logits, x, dropout=self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture's logits [B, C] for normalised images [B, ch, H, W]."""
        return self.mixed(self._members[0](x), x)


class _Server:
    """The state of one run of IntactOFL, and the steps of an epoch."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: IntactOflConfig = job.config
        self.job, self.config, self.progress = job, config, progress
        # The terms look at every expert by itself: nothing combines the logits [M, B, C].
        self.members = Ensemble.of_job(
            job, job.uploads, nn.Identity(), fold=not config.bn_weight, precision=config.teacher_precision
        )
        if config.bn_weight:
            note_without_statistics(self.members.members, progress)
        self.experts = _Experts(self.members, config.gate, _start(job)).to(job.device)
        self.images = GeneratedImages(
            job, config.recipe(), latent=config.latent, batch_size=config.synthesis_batch_size
        )
        self.standardize = Standardize(job.normalization).to(job.device)
        optimizer = torch.optim.Adam(self.experts.parameters(), config.gate_lr)
        pool = Pool(config.pool_cap, job.device)
        self.stage = Stage({"student": self.experts}, optimizer, pool, made=config.synthesis_batch_size)

    def epoch(self, epoch: int) -> dict[str, float]:
        """One epoch: make images, remember them, train the gate on all."""
        tick = partial(self.progress.report, epoch, self.config.epochs)
        with self.stage.clock("synthesis"):
            batch = self.synthesize(epoch, tick)
        with self.stage.clock("gate"):
            self.stage.pool.add(**self.remembered(batch))
            return {**batch.losses, "gate": self.learn(epoch, tick)}

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> Batch:
        """Make the images of an epoch: those that the experts put into their class, and disagree on."""
        config = self.config
        with batchnorm_loss(self.members.members if config.bn_weight else ()) as bn_loss:
            return self.images.batch(
                epoch,
                self.members,
                None,
                terms=[
                    Term("ce", 1.0, experts_cross_entropy),
                    Term("bn", config.bn_weight, lambda _: bn_loss()),
                    Term("distinct", config.distinct_weight, lambda view: -expert_divergence(view.teacher)),
                ],
                tick=tick,
            )

    @torch.no_grad()
    def remembered(self, batch: Batch) -> dict[str, Tensor]:
        """Return the pool's rows for new images; of images read unchanged the experts' logits stay the same."""
        rows = self.config.stored(batch.images, batch.labels)
        if self.config.pool_augmentation == "none":
            parts = torch.split(rows["images"], self.config.batch_size)
            logits = torch.cat([self.members(self.standardize(dequantize(part))) for part in parts], dim=1)
            rows["members"] = logits.transpose(0, 1)
        return rows

    def learn(self, epoch: int, tick: Callable[[], None]) -> float:
        """Pass once over the pool, one step of the gate per batch; return the mean cross-entropy."""
        config, rng, losses = self.config, generator(self.job.seed, "gate", epoch), []
        augment = AUGMENTATIONS[config.pool_augmentation]
        self.experts.train()
        for rows in shuffled_batches(self.stage.pool.columns, config.batch_size, rng, most=config.steps_per_epoch):
            inputs = self.standardize(augment(dequantize(rows["images"]), rng))
            with torch.no_grad():
                logits = rows["members"].transpose(0, 1) if "members" in rows else self.members(inputs)
            loss = cross_entropy(self.experts.mixed(logits, inputs), rows["labels"])
            self.stage.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.stage.optimizer.step()
            losses.append(loss.detach())
            tick()
        return float(torch.stack(losses).mean())


def experts_cross_entropy(view: View) -> Tensor:
    """Return ``mean_k mean_i CE(f_k(x_i), y_i)``, a scalar; the view's teacher is all members' logits [M, B, C]."""
    return cross_entropy(view.teacher.flatten(0, 1), view.labels.repeat(len(view.teacher)))


def _start(job: Job) -> State:
    """Return the gate before its first step: all experts alike, or FENS's drawn weights."""
    members, classes = max(1, len(job.uploads)), job.num_classes
    if job.config.gate == "predictions":
        return {"weight": torch.zeros(members, members * classes), "bias": torch.zeros(members)}
    asked_by = "setting 'intactofl.gate' is 'image', which"
    drawn = start_gate(job.seed, members=members, classes=classes, input_shape=job.input_shape, asked_by=asked_by)
    return {name: torch.from_numpy(value) for name, value in drawn.items()}


METHOD = Method(
    name="intactofl",
    title="IntactOFL",
    source="Zeng et al., ACM MM 2024",
    config=IntactOflConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR}),
    kind="ensemble",
    check=check_job,
)
