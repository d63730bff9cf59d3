"""FedDF: the ensemble of the uploaded models is distilled on real, unlabelled images that the server holds.

Paper: Lin, Kong, Stich, Jaggi, Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
    https://arxiv.org/abs/2006.07242; in one round, as the baseline of DENSE and Co-Boosting.
    Read version: a summary of the paper and of its code; no equation was checked against the text.
Symbols: f_k(x) -> members; AVGLOGITS -> combiners.Mean; d_j -> Job.proxy; T -> epochs.
Where: Eq. (2) and Algorithm 1, the server's part -> learner.learn_from_images.
Deviations: the defaults are those of Co-Boosting's comparison: a fresh student, SGD, temperature 4, one pass over the
    images per epoch. Preset "paper" is the paper's own setting: start at the average of the uploads, Adam, a cosine
    over 10,000 batches, temperature 1. Here the rate falls every 100 batches, and an epoch is at most one pass, so that
    10,000 batches take 12,800 images. The paper stops early on labelled validation images; here the server has no
    labels, and the last step is the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.options import config_class, option, presets
from ..distillation.learner import Learner, build_teacher, learn_from_images
from ..distillation.settings import QUICK_TEACHER, StudentOptions, shared
from ..method import ENSEMBLES, Job, Method, Need, Outcome, Progress
from ..teacher.average import average_uploads

# "paper": FedDF's own. "fedsyn": the row of DENSE's paper. The declared defaults: Co-Boosting's comparison.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**QUICK_TEACHER, "epochs": 12},
    "fedsyn": {
        "epochs": 200, "kd_temperature": 1.0, "weight_decay": 0.0, "schedule": "constant", "student_clip": 0.0,
    },
    "paper": {
        "start": "average",
        "epochs": 100,
        "steps_per_epoch": 100,
        "optimizer": "adam",
        "student_lr": 1e-3,
        "kd_temperature": 1.0,
        "weight_decay": 0.0,
        "student_clip": 0.0,
    },
}  # fmt: skip


@config_class("feddf")
class FedDfConfig(StudentOptions):
    """Options of FedDF; the defaults are Co-Boosting's."""

    optimizer: str = option("sgd", "optimiser of the student", choices=("sgd", "adam"))
    start: str = option(
        "fresh", "the student before its first step: fresh, or the uploads' average", choices=("fresh", "average")
    )
    augmentation: str = shared("augmentation", "none")

    preset = presets(PRESETS)


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs over the proxy images; the result is the last epoch's student."""
    config: FedDfConfig = job.config
    if config.start == "average" and not job.refines:
        job = replace(job, start=average_uploads(job, "setting 'feddf.start' is 'average' and not 'fresh'"))
    teacher = build_teacher(job, precision=config.teacher_precision)
    learner = Learner(job, teacher, config.distill_recipe(), augmentation=config.augmentation)
    return learn_from_images(job, progress, learner)


METHOD = Method(
    name="feddf",
    title="FedDF",
    source="Lin et al., NeurIPS 2020",
    config=FedDfConfig,
    fit=fit,
    needs=frozenset({Need.PROXY_IMAGES}),
    teachers=ENSEMBLES,
)
