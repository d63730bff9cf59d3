"""DW-FedENS: the server predicts with the mean of all models' logits, weighted by their numbers of examples.

Paper: Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting, ICLR 2024,
    https://arxiv.org/abs/2402.15070. Read version: arXiv v1.
Symbols: f_k -> the model of uploads[k]; n_k -> uploads[k].num_examples.
Where: A_w(x) = sum_k w_k f_k(x), Eq. (2), with w_k = n_k / sum_j n_j -> combiners.combiners.Weighted.
Deviations: if a client sends no number of examples, all weigh the same, and the metrics note it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..combiners.combiners import Weighted
from ..core.errors import OptionError
from ..method import EnsembleSpec, Job, Method, Outcome, Progress, Teacher
from ..teacher.average import example_weights, recorded_weights
from ..teacher.ensemble import Ensemble


@dataclass(frozen=True)
class DwFedEnsConfig:
    """DW-FedENS has no options."""


def fit(job: Job, progress: Progress) -> Outcome:
    """Name the ensemble of all uploads and its weights; nothing is trained."""
    weights = Weighted(recorded_weights(job, progress)).state_dict()
    progress.report(1, 1)
    return Outcome(ensemble=EnsembleSpec.of(job, "weighted", weights))


METHOD = Method(
    name="dw-fedens",
    title="DW-FedENS",
    source="Dai et al., ICLR 2024",
    config=DwFedEnsConfig,
    fit=fit,
    kind="ensemble",
)


# A job's uploads weighted by their numbers of examples, as a teacher: the rows "DW-" of Co-Boosting's Table 4.


def build_sized_teacher(job: Job, *, fold: bool = True, precision: str = "float32") -> tuple[Ensemble, Weighted]:
    """Return the ensemble ``sum_k n_k f_k(x) / sum_k n_k`` of a job's uploads, and its combiner.

    Raises:
        OneShotError: A client does not report its number of examples, or its weights do not fit its architecture.
    """
    check_sizes(job, "teacher")
    combiner = Weighted(example_weights([upload.num_examples for upload in job.uploads]) or [])
    return Ensemble.of_job(job, job.uploads, combiner, fold=fold, precision=precision), combiner


def check_sizes(job: Job, key: str) -> None:
    """Refuse uploads without their numbers of examples; the job's uploads may be missing."""
    if silent := [upload.client for upload in job.uploads if upload.num_examples is None]:
        raise OptionError(
            f"{key} is {TEACHER.name!r}, which needs the numbers of examples that these clients did not send: "
            f"{', '.join(silent)}. Choose another teacher"
        )


TEACHER = Teacher("dw-fedens", build_sized_teacher, check_sizes)
