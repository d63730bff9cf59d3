"""Label-count ensemble: each model's logit of a class is weighted by its training examples of that class.

Paper: Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma, Revisiting Ensembling in One-Shot Federated
    Learning, NeurIPS 2024, https://arxiv.org/abs/2411.07182. Read version: arXiv v1.
Symbols: z_i -> logits of uploads[i]; n_i^c -> uploads[i].label_counts[c]; lambda_i[c] = n_i^c / sum_j n_j^c.
Where: the static aggregation "weighted averaging", sum_i lambda_i * z_i -> combiners.combiners.LabelCount.
Deviations: a class that no client holds gets weight, and therefore logit, zero; the paper leaves 0/0 open.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..combiners.combiners import LabelCount
from ..method import EnsembleSpec, Job, Method, Need, Outcome, Progress


@dataclass(frozen=True)
class LabelCountConfig:
    """The label-count ensemble has no options."""


def fit(job: Job, progress: Progress) -> Outcome:
    """Name the ensemble of all uploads and its weights; nothing is trained."""
    counts = [upload.label_counts or (0,) * job.num_classes for upload in job.uploads]
    weights = LabelCount(counts).state_dict()
    progress.report(1, 1)
    return Outcome(ensemble=EnsembleSpec.of(job, "label-count", weights))


METHOD = Method(
    name="label-count-ensemble",
    title="Label-count ensemble",
    source="Allouah et al., NeurIPS 2024",
    config=LabelCountConfig,
    fit=fit,
    needs=frozenset({Need.LABEL_COUNTS}),
    kind="ensemble",
)
