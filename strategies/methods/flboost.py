"""FLBoost (FedFTG): a conditional generator finds knowledge of the clients' models that the combined model lacks.

Paper: Zhang, Shen, Ding, Tao, Duan, Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID
    Federated Learning, CVPR 2022, https://arxiv.org/abs/2203.09249. Read version: its submission, FLBoost, whose
    equations are compared with this code and numbered so here, and a summary of the published code.
Symbols: omega -> student; theta, G -> generator; f_k -> teacher.members; alpha_t^{k,y} -> weights; p_t(y) -> labels;
    I, I_g, I_d -> iterations, generator_steps, student_steps; b -> batch_size; lambda_cls, lambda_r -> ce_weight,
    diversity_weight; S_t -> the uploads.
Where: L_md, Eq. (3), L_cls, Eq. (4), and their sum, Eq. (2) -> distillation.consensus and
    FlBoostServer._generator_step; R -> distillation.losses.diversity; p_t, Eq. (5), and alpha, Eq. (6) ->
    distillation.matched; Table 5 -> ConditionalGenerator, FeatureGenerator; Algorithm 2 -> FlBoostServer.iteration.
Deviations: the paper and its code differ, and each has a preset. By default the loop is the code's: one generator step
    per client, L1 of logits with the clients' as constants, KL with the clients first, labels in fixed shares, the
    code's form of the generator. The cross-entropy is weighed per sample as in the paper. The KL is summed over
    classes: the code's mean over them makes the learning rate C times smaller. The rates fall by a factor per round, as
    in the code; the text calls their decay quadratic and prints the same 0.998. alpha has no 1e-6 in its denominator,
    because a class without examples is never drawn. ``augmentation`` is an addition, whose crops have a black border.
    Clients come in the order of their names. Unless all clients report label counts, classes and clients weigh the
    same; Tally's pool has its own, teaching alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..combiners.opinion_pools import OpinionPool
from ..core.errors import OptionError
from ..core.gpu import eager
from ..core.options import config_class, option, presets
from ..core.processor import in_bfloat16
from ..core.seeds import generator, seeded_torch
from ..core.work import work
from ..distillation import consensus
from ..distillation.epochs import clock_block, copy_weights, sample_images
from ..distillation.generators import GENERATOR_FORMS
from ..distillation.losses import diversity
from ..distillation.matched import DRAWS, LEVELS, Matched, check_level, draw_labels, shares_of
from ..distillation.pool import quantize
from ..distillation.settings import shared
from ..distillation.synthesis import generate
from ..method import POOLS, InRounds, Job, Method, Outcome, Progress
from ..teacher.augment import AUGMENTATIONS, Standardize
from ..teacher.average import average_uploads
from ..teacher.student import frozen, observe

# "paper": the text. "published-code": its release. "feddf": the FedDF of its comparison, by the text: a generator that
# learns as FedGen's, from the cross-entropy of the mean output with uniform labels, and the average of logits as the
# teacher. 50 steps of the generator and 20 of the model are the release's, here in ten turns.
# "quick": tried out on Fashion-MNIST; it suits models as small as the main job's.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"adversarial_weight": 0.1, "generator_step": "joint", "generator_steps": 3, "student_lr": 0.05},
    "paper": {
        "discrepancy": "kl",
        "generator_step": "joint",
        "student_divergence": "student-first",
        "label_draw": "independent",
        "generator": "paper",
    },
    "published-code": {"ce_form": "batch-mean", "per_class": True},
    "feddf": {
        "adversarial_weight": 0.0, "diversity_weight": 0.0, "ce_form": "mean-output", "labels": "uniform",
        "label_draw": "independent", "weights": "uniform", "ensemble": "logits", "generator_step": "joint",
        "generator_steps": 5, "student_steps": 2,
    },
}  # fmt: skip


@config_class("flboost")
class FlBoostConfig:
    """Options of FLBoost; the defaults are its published values."""

    iterations: int = option(10, "times the generator, then the model learns, per call I", low=1, main=True)
    generator_steps: int = option(
        1, "generator steps per iteration I_g; per-client: passes over the clients", low=1, main=True
    )
    student_steps: int = option(5, "steps of the model per iteration I_d", low=1, main=True)
    batch_size: int = option(50, "generated examples per step b", low=2, setting=False)
    latent: int = shared("latent", 100)
    generator_lr: float = option(0.01, "Adam's learning rate of the generator", above=0.0, setting=False)
    generator_precision: str = shared("generator_precision", "auto")
    student_lr: float = shared("student_lr", 0.1)
    lr_decay: float = option(
        0.998, "factor of both learning rates from round to round", above=0.0, high=1.0, setting=False
    )
    weight_decay: float = option(1e-3, "weight decay of the model", low=0.0, setting=False)
    adversarial_weight: float = option(
        1.0, "weight of the discrepancy L_md that the generator seeks (ADV)", low=0.0, main=True
    )
    ce_weight: float = option(1.0, "weight of the clients' cross-entropy lambda_cls", low=0.0)
    diversity_weight: float = option(1.0, "weight of the diversity loss lambda_r", low=0.0)
    discrepancy: str = option("logits", "L_md: L1 or squares of logits, or KL", choices=consensus.DISCREPANCIES)
    generator_step: str = option(
        "per-client", "a generator step sees one client, or all of them", choices=("per-client", "joint")
    )
    ce_form: str = option(
        "per-sample", "alpha weighs each sample, the batch's mean, or the clients' output", choices=consensus.CE_FORMS,
        setting=False,
    )  # fmt: skip
    student_divergence: str = option(
        "teacher-first", "first distribution in the model's KL, or squares of logits", choices=consensus.DIRECTIONS
    )
    per_class: bool = option(False, "the model's KL is averaged over classes too: a factor 1/C", setting=False)
    labels: str = option(
        "counts", "classes to make: as often as clients hold them, or equally (no FKD)", choices=("counts", "uniform")
    )
    label_draw: str = option(
        "fixed", "labels: fixed shares, shuffled, or each drawn by itself", choices=DRAWS, setting=False
    )
    weights: str = option(
        "per-class", "alpha: by the clients' examples of a class, or equal (no AEN)", choices=("per-class", "uniform")
    )
    ensemble: str = option(
        "probabilities", "the model learns from each client, or a mean", choices=consensus.MEANS, setting=False
    )
    augmentation: str = shared("augmentation", "none")
    generator: str = option(
        "published-code", "form of the generator of images: its release's, or Table 5a", choices=GENERATOR_FORMS,
        setting=False,
    )  # fmt: skip
    level: str = option(
        "images", "generated inputs: images, or inputs of the last layer, which alone is tuned", choices=LEVELS
    )
    generator_width: int = shared("generator_width", 512)

    preset = presets(PRESETS)

    def __post_init__(self) -> None:
        if not (self.adversarial_weight or self.ce_weight or self.diversity_weight):
            raise OptionError(
                "settings 'flboost.adversarial-weight', 'flboost.ce-weight' and 'flboost.diversity-weight' are all 0: "
                "must be at least one number greater than 0, from which the generator learns"
            )
        if self.ce_form == "mean-output" and self.generator_step != "joint":
            raise OptionError(
                "setting 'flboost.ce-form' is 'mean-output' and 'flboost.generator-step' 'per-client': must be "
                "'joint', because a mean needs all clients"
            )
        if self.generator_width % 2:
            raise OptionError(f"setting 'server.generator-width' is {self.generator_width}: must be an even number")
        if self.level == "features" and self.augmentation != "none":
            raise OptionError(
                f"setting 'server.augmentation' is {self.augmentation!r} and 'flboost.level' 'features': must be "
                "'none', or the level 'images'"
            )


def fit(job: Job, progress: Progress) -> Outcome:
    """Fine-tune the model that the uploads were combined to; without one, their average of its architecture.

    Raises:
        OptionError: There is no model to start from, or models, memory and settings do not fit.
    """
    # In rounds names are in order already; the steps per client are not to depend on it.
    job = replace(job, uploads=tuple(sorted(job.uploads, key=lambda upload: upload.client)))
    if job.start is None:
        job = replace(job, start=average_uploads(job, "method 'flboost' has no model to start from"))
    server, iterations = FlBoostServer(job, progress), job.config.iterations
    with seeded_torch(job.seed, "flboost", job.server_round):
        for number in range(iterations):
            server.iteration(number)
            progress.report(number + 1, iterations)
    progress.record({"epoch": iterations, **server.losses(), **observe(job, iterations, server.student)})
    return server.outcome()


class FlBoostServer:
    """The state of a call of FLBoost, and one of its iterations."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: FlBoostConfig = job.config
        self.job, self.config, self.progress = job, config, progress
        models = Matched.of(job, config.level, config.latent, config.generator_width, form=config.generator)
        self.student, self.judge, self.teacher = models.student, models.judge, models.teacher
        self.generator = models.generator
        decay = config.lr_decay ** (job.server_round - 1)
        self._teach = eager(torch.optim.SGD)(
            self.judge.parameters(), config.student_lr * decay, weight_decay=config.weight_decay
        )
        self._learn = eager(torch.optim.Adam)(self.generator.parameters(), config.generator_lr * decay, fused=True)
        self._bf16 = in_bfloat16(config.generator_precision, job.device)
        self._standardize = Standardize(job.normalization).to(job.device)
        self._lesson = partial(
            consensus.Lesson.of_ensemble,
            self.teacher,
            mean="pool" if job.teacher is not None else config.ensemble,
            direction=config.student_divergence,
            per_class=config.per_class,
        )
        self._labels, self._weights = self._draw()
        self._made: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._seconds = dict.fromkeys(("synthesis", "distillation"), 0.0)
        self._clock = partial(clock_block, self._seconds)

    def iteration(self, number: int) -> None:
        """Let the generator learn, then the model, on one batch of noise and labels."""
        config, device = self.config, self.job.device
        rng = generator(self.job.seed, "flboost", self.job.server_round, "iteration", number)
        noise = torch.randn(config.batch_size, config.latent, generator=rng).to(device)
        batch = slice(number * config.batch_size, (number + 1) * config.batch_size)
        labels, weights = self._labels[batch], self._weights[:, batch]
        alone = [slice(member, member + 1) for member in range(len(weights))]
        with self._clock("synthesis"), frozen(self.judge):
            for _ in range(config.generator_steps):
                for part in [slice(0, len(weights))] if config.generator_step == "joint" else alone:
                    self._generator_step(noise, labels, weights, part, rng)
                    self.progress.report(number, config.iterations)
        with self._clock("distillation"):
            self._student_steps(noise, labels, weights, rng)

    def _generator_step(
        self, noise: Tensor, labels: Tensor, weights: Tensor, part: slice, rng: torch.Generator
    ) -> None:
        """Make one step of the generator against some of the clients; R counts once over all of them."""
        config = self.config
        made = self._make(noise, labels, training=True)
        terms: dict[str, Tensor] = {}
        if config.adversarial_weight or config.ce_weight:
            images, some = self._look(made, rng), weights[part]
            # L1 of logits takes the clients' as constants: without cross-entropy no gradient goes through them.
            with torch.set_grad_enabled(bool(config.ce_weight) or config.discrepancy != "logits"):
                logits = self._ask(images, part)
            if config.adversarial_weight:
                terms["adversarial"] = -consensus.discrepancy(self.judge(images), logits, some, config.discrepancy)
            if config.ce_weight:
                terms["ce"] = consensus.weighted_cross_entropy(logits, labels, some, config.ce_form)
        if config.diversity_weight:
            terms["diversity"] = diversity(noise, made) * ((part.stop - part.start) / len(weights))
        factors = {name: getattr(config, f"{name}_weight") for name in terms}
        terms["generator"] = torch.stack([factors[name] * term for name, term in terms.items()]).sum()
        self._learn.zero_grad()
        terms["generator"].backward()  # type: ignore[no-untyped-call]
        self._learn.step()
        work().generator_stepped(self._bf16)
        for name, term in terms.items():
            self._add(name, term / (config.iterations * config.generator_steps))

    def _student_steps(self, noise: Tensor, labels: Tensor, weights: Tensor, rng: torch.Generator) -> None:
        """Let the model learn; images that are not changed, and the clients' answers, are the same in every step."""
        config, changes = self.config, self.config.augmentation != "none"
        with torch.no_grad():
            self._made = self._make(noise, labels, training=False)
        self.judge.train()
        for step in range(config.student_steps):
            if changes or step == 0:
                images = self._look(self._made, rng)
                lesson = self._lesson(images, weights)
            loss = lesson.loss(self.judge(images))
            self._teach.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._teach.step()
            work().student_steps += 1
            self._add("distillation", loss / (config.iterations * config.student_steps))

    def _ask(self, images: Tensor, part: slice) -> Tensor:
        """Return the logits of some members [m, B, C]."""
        return self.teacher.member_logits(images, part if part.stop - part.start < len(self.teacher.members) else None)

    def _make(self, noise: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        return generate(self.generator.train(training), noise, labels, bf16=self._bf16)

    def _look(self, made: Tensor, rng: torch.Generator) -> Tensor:
        """Return the models' input, made from the generator's output."""
        if self.config.augmentation == "none":
            return made
        pixels = AUGMENTATIONS[self.config.augmentation](self._standardize.inverse(made), rng)
        return self._standardize(pixels)  # type: ignore[no-any-return]

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Return the labels [I b] of all iterations, and each client's weight for each of them [M, I b]."""
        job, config = self.job, self.config
        found = pool.examples().cpu() if isinstance(pool := self.teacher.combiner, OpinionPool) else None
        held, alpha = shares_of(job, self.progress, labels=config.labels, weights=config.weights, found=found)
        rng = generator(job.seed, "flboost", job.server_round, "labels")
        labels = draw_labels(held, config.iterations * config.batch_size, config.label_draw, rng).to(job.device)
        return labels, alpha.to(job.device)[:, labels]

    def _add(self, name: str, share: Tensor) -> None:
        """Add to a mean over the call; it stays on the device until the end."""
        self._sums[name] = self._sums.get(name, torch.zeros((), device=share.device)) + share.detach()

    def losses(self) -> dict[str, float]:
        """Return the mean of each loss over the call, a generator's term summed over the clients."""
        return {name: float(value) for name, value in self._sums.items()}

    def outcome(self) -> Outcome:
        """Return the model, the generator, and a sample of the last images."""
        images = None
        if self.config.level == "images" and self._made is not None:
            images = sample_images(quantize(self._standardize.inverse(self._made)), self.job.store_images)
        return Outcome(
            student=copy_weights(self.student),
            timings=self._seconds,
            images=images,
            memory=copy_weights(self.generator),
        )


METHOD = Method(
    name="flboost",
    title="FLBoost",
    source="Zhang et al., CVPR 2022",
    config=FlBoostConfig,
    fit=fit,
    check=lambda job: check_level(job, job.config.level, table="flboost"),
    teachers=POOLS,
    in_rounds=InRounds(draws_by_round=True),
)
