"""DW-FedENS: the server predicts with the mean of all models' logits, weighted by their numbers of examples.

Paper: Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting, ICLR 2024,
    https://arxiv.org/abs/2402.15070. Read version: arXiv v1.
Symbols: f_k -> the model of uploads[k]; n_k -> uploads[k].num_examples.
Where: A_w(x) = sum_k w_k f_k(x), Eq. (1), with w_k = n_k / sum_j n_j -> combiners.combiners.Weighted.
Deviations: if a client sends no number of examples, all weigh the same, and the metrics note it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..combiners.combiners import Weighted
from ..method import EnsembleSpec, Method, Outcome
from ..teacher.average import recorded_weights

if TYPE_CHECKING:
    from ..method import Job, Progress


@dataclass(frozen=True)
class DwFedEnsConfig:
    """DW-FedENS has no options."""


def fit(job: Job, progress: Progress) -> Outcome:
    """Name the ensemble of all uploads and its weights; nothing is trained."""
    weights = Weighted(recorded_weights(job, progress)).state_dict()
    progress.report(1, 1)
    return Outcome(ensemble=EnsembleSpec(tuple(upload.client for upload in job.uploads), "weighted", dict(weights)))


METHOD = Method(
    name="dw-fedens",
    title="DW-FedENS",
    source="Dai et al., ICLR 2024",
    config=DwFedEnsConfig,
    fit=fit,
    kind="ensemble",
)
