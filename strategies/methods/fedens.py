"""FedENS: the server keeps all uploaded models and predicts with the mean of their logits.

Paper: the name is from Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting, ICLR
    2024, https://arxiv.org/abs/2402.15070; the ensemble is Guha, Talwalkar, Smith, One-Shot Federated Learning, 2019,
    https://arxiv.org/abs/1902.11175. Read version: arXiv v1 of both.
Symbols: f_k -> the model of uploads[k]; w_k = 1/n -> combiners.combiners.Mean.
Where: A_w(x) = sum_k w_k f_k(x), Eq. (2) of Co-Boosting with w_k = 1/n -> fit.
Deviations: none known; logits are averaged, as in all published codes. The mean of probabilities is an option, in which
    unsure clients have less influence.
"""

from __future__ import annotations

from ..core.options import config_class, option
from ..method import EnsembleSpec, Job, Method, Outcome, Progress


@config_class("fedens")
class FedEnsConfig:
    """Options of FedENS."""

    mean: str = option("logits", "the averaged values: logits, or probabilities", choices=("logits", "probabilities"))


def fit(job: Job, progress: Progress) -> Outcome:
    """Name the ensemble of all uploads; nothing is trained."""
    progress.report(1, 1)
    combiner = "mean" if job.config.mean == "logits" else "mean-probability"
    return Outcome(ensemble=EnsembleSpec.of(job, combiner))


METHOD = Method(
    name="fedens",
    title="FedENS",
    source="Guha et al., 2019; Dai et al., ICLR 2024",
    config=FedEnsConfig,
    fit=fit,
    kind="ensemble",
)
