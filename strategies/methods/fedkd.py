"""FedKD: the label-count ensemble of the uploads is distilled on real, unlabelled images, logit by logit.

Paper: Gong, Sharma, Karanam, Wu, Chen, Doermann, Innanje, Preserving Privacy in Federated Learning with Ensemble
    Cross-Domain Knowledge Distillation, AAAI 2022, https://arxiv.org/abs/2209.04599; in one shot, as the baseline of
    FENS (Allouah et al., NeurIPS 2024, https://arxiv.org/abs/2411.07182). Read version: a summary of both papers and
    of their codes; no equation was checked against the text.
Symbols: z_k -> logits of uploads[k]; n_k^c -> uploads[k].label_counts[c]; lambda_k[c] = n_k^c / sum_j n_j^c; T ->
    kd_temperature.
Where: the teacher, sum_k lambda_k * z_k -> combiners.combiners.LabelCount; the loss -> losses.logit_distance, or
    losses.soft_kl with ``loss="kl"``; the server's epochs -> learner.learn_from_images.
Deviations: as in FENS's comparison, the clients' predictions are neither quantised nor noisy. The loss is L1 on logits,
    the published code's default; its other choice, KL at T = 3, is the option. The published code keeps the best epoch
    on the test set; here the last epoch is the result. A class that no client holds has logit zero.
"""

from __future__ import annotations

from ..combiners.combiners import LabelCount
from ..core.options import config_class, option, presets
from ..distillation.learner import Learner, build_teacher, learn_from_images
from ..distillation.losses import logit_distance
from ..distillation.settings import OPTIMIZER, ProxyStudentOptions, shared
from ..method import ENSEMBLES, Job, Method, Need, Outcome, Progress


@config_class("fedkd")
class FedKdConfig(ProxyStudentOptions):
    """Options of FedKD."""

    kd_temperature: float = shared("kd_temperature", 3.0)  # of kl
    loss: str = option("l1", "how far student and ensemble are apart: L1 of logits, or kl", choices=("l1", "kl"))

    preset = presets({"quick": {"epochs": 12}})


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs over the proxy images; the result is the last epoch's student."""
    config: FedKdConfig = job.config
    # Without counts, the job has a teacher of its own: the need is checked before a method starts.
    counts = [upload.label_counts or (0,) * job.num_classes for upload in job.uploads]
    loss = logit_distance if config.loss == "l1" else None
    recipe = config.distill_recipe(optimizer=OPTIMIZER)
    teacher = build_teacher(job, LabelCount(counts))
    # The ensemble judges every image once, unchanged; the student sees the augmented copies.
    learner = Learner(job, teacher, recipe, augmentation=config.augmentation, loss=loss, asked_once=True)
    return learn_from_images(job, progress, learner)


METHOD = Method(
    name="fedkd",
    title="FedKD",
    source="Gong et al., AAAI 2022, as in Allouah et al., NeurIPS 2024",
    config=FedKdConfig,
    fit=fit,
    needs=frozenset({Need.PROXY_IMAGES, Need.LABEL_COUNTS}),
    teachers=ENSEMBLES,
)
