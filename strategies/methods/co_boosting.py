"""Co-Boosting: the ensemble and the images that it is distilled on improve each other, epoch by epoch.

Paper: Dai, Zhang, Li, Liu, Yang, Han, Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting,
    ICLR 2024, https://arxiv.org/abs/2402.15070. Read version: the ICLR one with its appendix, whose equations are
    compared with this code, and the authors' code.
Symbols: A_w(x) -> teacher, logits weighted by w; f_S -> student; G -> generator; T -> epochs; T_G -> generator_steps;
    beta -> adversarial_weight; epsilon -> perturbation_size; mu -> reweighting_step; D_S -> pool.
Where: hard-sample loss L_H, Eqs. (5), (6) -> losses.hard_cross_entropy; L_A, Eq. (7), and their sum, Eq. (8) ->
    CoBoostingServer.synthesize; diversification, Eqs. (9), (10) -> CoBoostingServer.perturb; reweighting, Eqs. (11),
    (12) -> CoBoostingServer.reweight with combiners.combiners.weighted_mean_gradient; Algorithm 1 ->
    CoBoostingServer.epoch.
Deviations: the defaults are those of the published code where it differs from the text, since its figures come from
    there: L_A at temperature 3 with factor 9; the perturbation is the sign of the gradient of softened probabilities,
    in normalised space; the weights see the pool of earlier epochs, and their step shrinks by 0.99 per epoch; the
    ensemble divides by the sum of w, so that the weights are clipped to [0, 1] and not normalised. The step mu is
    0.1 / M as in the text, which at ten clients is the code's 0.01. Preset "paper" is the text, except for the code's
    Adam, which has the decays 0.5 and 0.999 and begins anew every epoch, and for two points: l_KL at temperature 4 has
    the factor 16, which the text does not print; and the images that teach the student are perturbed by other u than
    those that teach w, where line 11 of Algorithm 1 perturbs them once for both.
Another teacher: where the job's is Tally's pool, w are the pool's weights, l_k(c) = w_k n_k^c / sum_j w_j n_j^c, and
    the gradient is that of autograd. No w falls to 0, so that a class of one client alone stays with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..combiners.combiners import Weighted, WeightedSum, name_of, weighted_mean_gradient, weights_gradient
from ..core.gpu import Graphed
from ..core.options import config_class, option, presets
from ..core.seeds import generator
from ..distillation import settings
from ..distillation.epochs import Stage, copy_weights, run_epochs
from ..distillation.learner import Learner, build_teacher
from ..distillation.losses import draw_directions, hard_cross_entropy, prediction_gradient, soft_kl, step_by_sign
from ..distillation.pool import Pool, shuffled_groups
from ..distillation.settings import StudentOptions, TextOrCodeOptions
from ..distillation.synthesis import Batch, GeneratedImages, Term, View
from ..method import POOLS, EnsembleSpec, Job, Method, Need, Outcome, Progress
from ..teacher.ensemble import TOGETHER

LEAST = 1e-3  # smallest weight in a pool, as a share of 1 / number of clients


# "paper": the text. "published-code": its script on CIFAR; on other data sets its pool augmentation is "none".
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**settings.QUICK_GENERATOR},
    "paper": {
        "keep_images": "last",
        "optimize_noise": False,
        "generator_reset": "never",
        "pool_precision": "float32",
        "difficulty": "differentiated",
        "generator_clip": 0.0,
        "adversarial_temperature": 1.0,
        "perturbation": "l2",
        "reweighting_decay": 1.0,
        "reweighting_data": "perturbed",
        "ensemble": "sum",
        "weight_decay": 0.0,
        "schedule": "constant",
        "student_clip": 0.0,
    },
    "published-code": {"epochs": 200, "reweighting_step": 0.01, "pool_augmentation": "crop-flip"},
}


@config_class("co-boosting")
class CoBoostingConfig(StudentOptions, TextOrCodeOptions):
    """Options of Co-Boosting; the defaults are the published code's, at the paper's 500 epochs.

    Its ablation (Table 7) switches off: GHS by ``hard_exponent=0, adversarial_weight=0``, DHS by
    ``perturbation="none"``, EE by ``reweighting=False``.
    """

    hard_exponent: float = option(1.0, "power of 1 - p in the hard-sample loss L_H; 0: plain cross-entropy", low=0.0)
    difficulty: str = option(
        "constant", "1 - p in L_H, to the generator's gradient: a constant, or differentiated too",
        choices=("constant", "differentiated"), setting=False,
    )  # fmt: skip
    adversarial_weight: float = option(1.0, "weight beta of the disagreement loss L_A; 0: none", low=0.0)
    adversarial_temperature: float = option(
        3.0, "temperature of L_A, with its square as a factor", above=0.0, setting=False
    )
    perturbation: str = option(
        "sign", "change of the images the student learns from: by the gradient's sign, along it, or none",
        choices=("sign", "l2", "none"),
    )  # fmt: skip
    perturbation_size: float = option(8 / 255, "size epsilon of that change, in normalised pixels", above=0.0)
    reweighting: bool = option(True, "the clients' weights w are learned; false: they stay equal")
    reweighting_step: float = option(0.0, "step mu of the weights; 0: 0.1 / number of clients", low=0.0)
    reweighting_decay: float = option(0.99, "factor of mu per epoch", above=0.0, high=1.0, setting=False)
    reweighting_data: str = option(
        "earlier", "images the weights see: those of earlier epochs, the newest too, or all of these perturbed",
        choices=("earlier", "all", "perturbed"), setting=False,
    )  # fmt: skip
    ensemble: str = option(
        "mean", "the logits, weighted by w: divided by the sum of w, or not", choices=("mean", "sum"), setting=False
    )

    preset = presets(PRESETS)


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage; the results are the last epoch's student and the ensemble with its final weights."""
    server = CoBoostingServer(job, progress)
    outcome = run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)
    return replace(outcome, ensemble=EnsembleSpec.of(job, name_of(server.combiner), copy_weights(server.combiner)))


class CoBoostingServer:
    """The state of one run of Co-Boosting, and the steps of an epoch."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: CoBoostingConfig = job.config
        self.job, self.config, self.progress = job, config, progress
        form = Weighted if config.ensemble == "mean" else WeightedSum
        equal = form([1 / len(job.uploads)] * len(job.uploads))
        self.teacher = build_teacher(job, equal, precision=config.teacher_precision)
        self.combiner = self.teacher.combiner
        if not isinstance(self.combiner, Weighted):
            self.weights.div_(self.weights.sum())  # the size that mu is made for
        self.learner = Learner(job, self.teacher, config.distill_recipe(), augmentation=config.pool_augmentation)
        self.images = GeneratedImages(
            job,
            config.recipe(),
            latent=config.latent,
            batch_size=config.synthesis_batch_size,
            reset=config.generator_reset,
        )
        self._moved = Graphed(self._perturbed, job.device, capture=self.teacher.is_local)
        self._reweighted = Graphed(self._better_weights, job.device)
        modules = {"student": self.learner.student, "weights": self.combiner, **self.images.modules}
        pool = Pool(config.pool_cap, job.device)
        self.stage = Stage(modules, self.learner.optimizer, pool, config.synthesis_batch_size, job.store_images)

    @property
    def perturbs_first(self) -> bool:
        """Whether the weights see images that are moved first, as line 11 of Algorithm 1 has it."""
        return self.config.reweighting_data == "perturbed" and self.config.perturbation != "none"

    @property
    def weights(self) -> Tensor:
        """The clients' weights w [M]."""
        return self.combiner.get_buffer("weights")

    def epoch(self, epoch: int) -> dict[str, float]:
        """One epoch in the order of the published code; Algorithm 1 adds the images before it reweighs."""
        config, pool = self.config, self.stage.pool
        tick = self.stage.ticks(self.progress, epoch, config.epochs)
        with self.stage.clock("synthesis"):
            batch = self.synthesize(epoch, tick)
        with self.stage.clock("reweighting"):
            if config.reweighting and config.reweighting_data == "earlier":
                self.reweight(epoch)
            pool.add(**self.remembered(batch))
            if config.reweighting and config.reweighting_data != "earlier":
                self.reweight(epoch)
        with self.stage.clock("distillation"):
            perturb = None if config.perturbation == "none" else self.perturb
            loss = self.learner.learn(self.table(), epoch, perturb=perturb, tick=tick)
        return {**batch.losses, "distillation": loss, "largest-weight": float(self.weights.max() / self.weights.sum())}

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> Batch:
        """Make the images of an epoch; the loss is L_H + beta L_A, Eq. (8)."""
        config = self.config

        def hard(view: View) -> Tensor:
            moves = config.difficulty == "differentiated"
            return hard_cross_entropy(view.teacher, view.labels, config.hard_exponent, differentiated=moves)

        def disagreement(view: View) -> Tensor:
            assert view.student is not None  # noqa: S101  computed whenever this term has a weight
            return -soft_kl(view.student, view.teacher, config.adversarial_temperature)

        return self.images.batch(
            epoch,
            self.teacher,
            self.learner.student if config.adversarial_weight else None,
            terms=[Term("hard", 1.0, hard), Term("adversarial", config.adversarial_weight, disagreement)],
            tick=tick,
        )

    def remembered(self, batch: Batch) -> dict[str, Tensor]:
        """Return the pool's rows for new images.

        Where images are read unchanged, the clients' logits on them stay the same for all weights w.
        """
        rows = self.config.stored(batch.images, batch.labels)
        known = self.config.reweighting or self.config.perturbation == "none"
        if known and self.learner.reads_unchanged and not self.perturbs_first:
            rows["members"] = self.learner.member_logits(rows["images"])
        return rows

    def table(self) -> dict[str, Tensor]:
        """Return the pool, with the ensemble's logits under the current weights where the clients' are known."""
        columns = self.stage.pool.columns
        if "members" not in columns or self.config.perturbation != "none":
            return columns
        return {**columns, "logits": self.combiner(columns["members"].transpose(0, 1))}

    @torch.no_grad()
    def reweight(self, epoch: int) -> None:
        """Pass once over the pool and move w by one signed step per batch, Eqs. (11), (12)."""
        config, weights = self.config, self.weights
        size = (config.reweighting_step or 0.1 / len(weights)) * config.reweighting_decay**epoch
        step = torch.tensor(size, dtype=weights.dtype, device=weights.device)
        for logits, labels in self.judgements(epoch):
            weights.copy_(self._reweighted(logits, labels, step))

    def _better_weights(self, logits: Tensor, labels: Tensor, step: Tensor) -> Tensor:
        """Return the weights [M] after one signed step on a batch."""
        weights, pooled = self.weights, not isinstance(self.combiner, Weighted)
        least = LEAST / len(weights) if pooled else 0.0
        moved = (weights - step * self.gradient(logits, labels).sign()).clamp(least, 1)
        if pooled:  # a client that is left out stays so
            moved = torch.where(weights > 0, moved, weights)
        # All weights at zero would leave no ensemble; neither the paper nor its code covers this case.
        return torch.where(moved.sum() < 1e-8, weights, moved)

    def gradient(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient [M] of the ensemble's cross-entropy by w, Eq. (12)."""
        if type(self.combiner) is Weighted:
            return weighted_mean_gradient(self.weights, logits, labels)
        return weights_gradient(self.combiner, logits, labels)

    def judgements(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass once over the pool in a random order; yield the clients' logits [M, B, C] and intended labels [B]."""
        columns, rng = self.stage.pool.columns, generator(self.job.seed, "reweighting", epoch)
        if "members" in columns:
            known = {name: columns[name] for name in ("members", "labels")}
            size, most = self.config.batch_size, self.config.steps_per_epoch
            for rows, sizes in shuffled_groups(known, size, rng, most=most, together=TOGETHER):
                logits = torch.split(rows["members"].transpose(0, 1), sizes, dim=1)
                yield from zip(logits, torch.split(rows["labels"], sizes), strict=True)
        elif columns:
            for inputs, rows in self.learner.read(columns, rng):
                seen = self.perturb(inputs, rng) if self.perturbs_first else inputs
                yield self.teacher.member_logits(seen), rows["labels"]

    def perturb(self, inputs: Tensor, rng: torch.Generator) -> Tensor:
        """Move normalised images [B, ch, H, W] to where the ensemble's prediction changes most, Eq. (10)."""
        directions = draw_directions(len(inputs), self.job.num_classes, rng)
        return self._moved(inputs, directions.to(inputs.device))

    def _perturbed(self, inputs: Tensor, directions: Tensor) -> Tensor:
        by_sign, size = self.config.perturbation == "sign", self.config.perturbation_size
        with torch.enable_grad():
            gradient = prediction_gradient(self.teacher, inputs, directions, softened=by_sign)
        if by_sign:
            return step_by_sign(inputs, gradient, size)
        norms = torch.linalg.vector_norm(gradient, dim=(1, 2, 3), keepdim=True).clamp_min(1e-12)
        return torch.addcdiv(inputs.detach(), gradient, norms, value=size)


METHOD = Method(
    name="co-boosting",
    title="Co-Boosting",
    source="Dai et al., ICLR 2024",
    config=CoBoostingConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR, Need.IMAGE_GRADIENTS}),
    teachers=POOLS,
)
