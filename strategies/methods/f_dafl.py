"""F-DAFL: data-free learning (DAFL) from the ensemble of the uploaded models.

Paper: Chen, Wang, Xu, Yang, Liu, Shi, Xu, Xu, Tian, Data-Free Learning of Student Networks, ICCV 2019,
    https://arxiv.org/abs/1904.01186; brought to one-shot federated learning as a baseline of DENSE and Co-Boosting.
    Read version: a summary of the paper and of its code.
Symbols: A(x) -> teacher, the mean of logits; G -> generator; f_T -> penultimate features; alpha -> activation_weight;
    beta -> information_weight.
Where: one-hot loss L_oh, activation loss L_a, information entropy loss L_ie, section 3.3, and their sum ->
    FDaflServer.synthesize with losses.information and heads.penultimate_features.
Deviations: the papers that compare with it run it "with the same hyper-parameters" and give no others. So its loss
    replaces theirs in the shared loop. That loop has their generator, new in every epoch, a pool of images, and a
    student that learns from the pool instead of from the generator's current images. Weights (1, 5, 0.1) and the
    logarithm to base 10 are those of the published code. The features are the mean over the clients of the inputs of
    their last linear layer: 84 numbers of LeNet-5, where the papers name the layer before, of 120. If a client has no
    such layer, or the lengths differ, the activation loss is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.errors import OptionError
from ..core.options import config_class, option, presets
from ..distillation import settings
from ..distillation.epochs import Stage
from ..distillation.learner import Learner, build_teacher, learn_from_made
from ..distillation.losses import cross_entropy, information
from ..distillation.pool import Pool
from ..distillation.settings import PoolOptions, StudentOptions, SynthesisOptions
from ..distillation.synthesis import Batch, GeneratedImages, Term, View
from ..method import ENSEMBLES, Job, Method, Need, Outcome, Progress
from ..teacher.heads import penultimate_features

# "fedsyn": the row of DENSE's paper.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**settings.QUICK_GENERATOR},
    "fedsyn": {
        "epochs": 200, "kd_temperature": 1.0, "weight_decay": 0.0, "schedule": "constant", "generator_clip": 0.0,
        "student_clip": 0.0,
    },
}  # fmt: skip


@config_class("f-dafl")
class FDaflConfig(StudentOptions, PoolOptions, SynthesisOptions):
    """Options of F-DAFL; the shared ones are Co-Boosting's, the weights DAFL's."""

    one_hot_weight: float = option(1.0, "weight of the one-hot loss L_oh", low=0.0, setting=False)
    information_weight: float = option(5.0, "weight beta of the information entropy loss L_ie", low=0.0, setting=False)
    activation_weight: float = option(0.1, "weight alpha of the activation loss L_a", low=0.0, setting=False)

    preset = presets(PRESETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.one_hot_weight or self.information_weight or self.activation_weight):
            raise OptionError(
                "options one_hot_weight, information_weight and activation_weight are all 0: must be at least one "
                "number greater than 0, from which the generator learns"
            )


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs of synthesis and distillation; the result is the last epoch's student."""
    server = FDaflServer(job, progress)
    return learn_from_made(job, progress, server.stage, server.learner, make=server.synthesize, options=job.config)


class FDaflServer:
    """The state of one run of F-DAFL."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: FDaflConfig = job.config
        self.config, self.progress = config, progress
        watched = config.activation_weight > 0
        self.teacher = build_teacher(job, precision=config.teacher_precision, watched=watched)
        self.learner = Learner(job, self.teacher, config.distill_recipe(), augmentation=config.pool_augmentation)
        self.images = GeneratedImages(
            job, config.recipe(), latent=config.latent, batch_size=config.synthesis_batch_size
        )
        modules, pool = {"student": self.learner.student}, Pool(config.pool_cap, job.device)
        self.stage = Stage(modules, self.learner.optimizer, pool, config.synthesis_batch_size, job.store_images)
        self._noted = False

    def synthesize(self, epoch: int, tick: Callable[[], None]) -> Batch:
        """Make the images of an epoch; the loss is L_oh + beta L_ie + alpha L_a."""
        config = self.config
        with penultimate_features(self.teacher.members if config.activation_weight else ()) as features:

            def one_hot(view: View) -> Tensor:
                return cross_entropy(view.teacher, view.teacher.argmax(1))

            def activation(view: View) -> Tensor:
                seen = features()
                return -seen.abs().mean() if seen is not None else self._no_features(view)

            return self.images.batch(
                epoch,
                self.teacher,
                None,
                terms=[
                    Term("one-hot", config.one_hot_weight, one_hot),
                    Term("information", config.information_weight, lambda view: information(view.teacher)),
                    Term("activation", config.activation_weight, activation),
                ],
                tick=tick,
            )

    def _no_features(self, view: View) -> Tensor:
        if not self._noted:
            self._noted = True
            self.progress.record(
                {"note": "the clients' last linear layers are missing or differ in length: there is no activation loss"}
            )
        return view.teacher.new_zeros(())


METHOD = Method(
    name="f-dafl",
    title="F-DAFL",
    source="Chen et al., ICCV 2019, as in Zhang et al., NeurIPS 2022",
    config=FDaflConfig,
    fit=fit,
    needs=frozenset({Need.SIDES_OF_FOUR, Need.IMAGE_GRADIENTS}),
    teachers=ENSEMBLES,
)
