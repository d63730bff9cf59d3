"""DENSE (FedSyn): the server makes images the uploaded models agree on and distils their ensemble into one model.

Paper: Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022,
    https://arxiv.org/abs/2112.12371 (first called FedSyn). Read version: its first one, FedSyn, whose equations are
    compared with this code and numbered so here; the NeurIPS one; and the authors' code.
Symbols: D(x) -> teacher, the mean of logits; f_S -> student; G -> generator; T -> epochs; T_G -> generator_steps;
    b -> batch_size; lambda_1 -> bn_weight; lambda_2 -> adversarial_weight; eta_G, eta_S -> generator_lr, student_lr.
Where: D, Eq. (3) -> teacher; similarity l_CE, Eq. (4) -> losses.cross_entropy; stability l_BN, Eq. (5) -> batchnorm;
    transferability l_div with its mask, Eq. (6) -> losses.adversarial_divergence; their sum, Eq. (7) ->
    DenseServer.synthesize; l_dis, Eq. (9) -> losses.soft_kl; Algorithm 1 -> DenseServer.epoch.
Deviations: l_BN uses the running statistics of the clients' own layers (the paper speaks of the generator's, which
    have nothing to be compared with; the published code never collects any). By default the student learns from all
    images made so far, as in the published code; Algorithm 1 uses the newest batch only: preset "paper". By
    default the generator also starts anew every epoch, and of its steps the images of the lowest loss are kept, as in
    the code; Algorithm 1 initialises it once and makes the images after its last step: preset "paper". Under both Adam,
    which the text names, begins anew every epoch, with the code's decays 0.5 and 0.999, and the generator's weights are
    drawn from N(0, 0.02), as in the code; the text says neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.options import config_class, option, presets
from ..distillation import settings
from ..distillation.epochs import Stage, run_epochs
from ..distillation.learner import Learner, add_to_pool, build_teacher, image_epoch
from ..distillation.losses import adversarial_divergence, cross_entropy
from ..distillation.pool import Pool
from ..distillation.settings import AUGMENTATION_NAMES, StudentOptions, TextOrCodeOptions, shared
from ..distillation.synthesis import Batch, GeneratedImages, Term, View
from ..method import ENSEMBLES, Job, Method, Need, Outcome, Plan, Progress
from ..teacher.batchnorm import batchnorm_loss, note_without_statistics, reads_statistics

# "quick": tried out on digits, where it takes seconds and the published values an hour. "paper": the text.
# "published-code": its release on CIFAR; on other data sets its pool augmentation is "flip". "fedsyn": its tables' row,
# on CIFAR. "co-boosting": the DENSE baseline of that paper on CIFAR; on other data sets its pool augmentation is none.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**settings.QUICK_GENERATOR, "epochs": 24, "synthesis_batch_size": 64, "kd_temperature": 4.0},
    "fedsyn": {"synthesis_augmentation": "crop-flip"},
    "paper": {
        "distillation_data": "fresh", "keep_images": "last", "optimize_noise": False, "generator_reset": "never",
    },
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
}  # fmt: skip


@config_class("dense")
class DenseConfig(StudentOptions, TextOrCodeOptions):
    """Options of DENSE: the paper's values; where text and code differ, the code's."""

    epochs: int = shared("epochs", 200)
    generator_clip: float = shared("generator_clip", 0.0)
    bn_weight: float = option(1.0, "weight of the batch-normalisation loss lambda_1", low=0.0)
    adversarial_weight: float = option(0.5, "weight of the disagreement loss lambda_2", low=0.0)
    adversarial_temperature: float = option(
        1.0, "temperature of the disagreement loss, with its square as a factor", above=0.0
    )
    kd_temperature: float = shared("kd_temperature", 1.0)
    weight_decay: float = shared("weight_decay", 0.0)
    schedule: str = shared("schedule", "constant")
    student_clip: float = shared("student_clip", 0.0)
    synthesis_augmentation: str = option(
        "none", "change of images before the models, in synthesis", choices=AUGMENTATION_NAMES, setting=False
    )
    distillation_data: str = option(
        "pool", "the student learns from all images so far, or the newest", choices=("pool", "fresh"), setting=False
    )
    rounds: int = option(1, "times the whole line of local training and server stage runs (Table 5)", low=1)

    preset = presets(PRESETS)


def plan(config: DenseConfig) -> Plan:
    """Return what a run involves: an upload of every client per round."""
    return Plan(rounds=config.rounds)


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs of synthesis and distillation; the result is the last epoch's student."""
    server = DenseServer(job, progress)
    return run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)


class DenseServer:
    """The state of one run of DENSE, and the steps of an epoch.

    Attributes:
        teacher: D(x), an ensemble that gradients pass through; not folded where there is a batch-normalisation loss.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        config: DenseConfig = job.config
        self.config, self.progress = config, progress
        self.teacher = build_teacher(
            job, precision=config.teacher_precision, watched=reads_statistics(job, config.bn_weight)
        )
        if config.bn_weight:
            note_without_statistics(self.teacher.members, progress)
        self.images = GeneratedImages(
            job,
            config.recipe(),
            latent=config.latent,
            batch_size=config.synthesis_batch_size,
            augmentation=config.synthesis_augmentation,
            reset=config.generator_reset,
        )
        self.learner = Learner(job, self.teacher, config.distill_recipe(), augmentation=config.pool_augmentation)
        # With fresh images the pool only remembers the newest, for the report.
        self.fresh = config.distillation_data == "fresh"
        pool = Pool(config.synthesis_batch_size if self.fresh else config.pool_cap, job.device)
        modules, made = {"student": self.learner.student, **self.images.modules}, config.synthesis_batch_size
        self.stage = Stage(modules, self.learner.optimizer, pool, made, job.store_images)

    def epoch(self, epoch: int) -> dict[str, float]:
        """Algorithm 1, one epoch: make images, remember them, distil."""
        return image_epoch(
            epoch,
            self.stage,
            self.learner,
            make=self.synthesize,
            remember=self.remember,
            progress=self.progress,
        )

    def remember(self, batch: Batch) -> dict[str, Tensor]:
        """Add an epoch's images to the pool; return the images the student learns from."""
        if not self.fresh:
            return add_to_pool(batch, self.stage, self.learner, self.config)
        self.stage.pool.add(**self.config.stored(batch.images, batch.labels))
        return self.learner.with_logits({"images": batch.images, "labels": batch.labels})

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> Batch:
        """Make the images of an epoch; the loss is l_CE + lambda_1 l_BN + lambda_2 l_div."""
        config = self.config
        watched = self.teacher.members if config.bn_weight else ()
        with batchnorm_loss(watched) as bn_loss:
            return self.images.batch(
                epoch,
                self.teacher,
                self.learner.student if config.adversarial_weight else None,
                terms=[
                    Term("ce", 1.0, lambda view: cross_entropy(view.teacher, view.labels)),
                    Term("bn", config.bn_weight, lambda _: bn_loss()),
                    Term("adversarial", config.adversarial_weight, self.disagreement),
                ],
                # As in the published code: the labels of a batch are a set, its order carries nothing.
                sort_labels=True,
                tick=tick,
            )

    def disagreement(self, view: View) -> Tensor:
        """Return l_div, Eq. (6)."""
        assert view.student is not None  # noqa: S101  computed whenever this term has a weight
        return adversarial_divergence(view.teacher, view.student, self.config.adversarial_temperature)


METHOD = Method(
    name="dense",
    title="DENSE",
    source="Zhang et al., NeurIPS 2022",
    config=DenseConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR, Need.IMAGE_GRADIENTS}),
    teachers=ENSEMBLES,
    plan=plan,
)
