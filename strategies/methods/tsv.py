"""TSV-Merge: the leading singular directions of the clients' updates, decorrelated and added.

Paper: Gargiulo, Crisostomi, Bucarelli, Scardapane, Silvestri, Rodola, Task Singular Vectors: Reducing Task Interference
    in Model Merging, CVPR 2025, https://arxiv.org/abs/2412.00081. Read version: the abstract, and descriptions of the
    rule.
Symbols: Delta_i -> Updates.updates; T -> the number of uploads; alpha -> scaling.
Where: TSV-Merge -> weights.rules.tsv; the loop over tensors -> weights.states.merge_states.
Deviations: singular values of rounding are left out, so that equal clients count once and a client without change has
    no say. Kernels of convolutions are matrices [O, rest]. Other tensors are averaged by numbers of examples.
    Statistics of batch normalisation are pooled and never scaled.
"""

from __future__ import annotations

from torch import Tensor

from ..core.options import config_class
from ..method import Job, Method, Need, Outcome, Progress
from ..teacher.weight_space import merge_in_weight_space, scaling
from ..weights.rules import average, tsv
from ..weights.states import Updates


@config_class("tsv")
class TsvConfig:
    """Options of TSV-Merge."""

    scaling: float = scaling()


def fit(job: Job, progress: Progress) -> Outcome:
    """Add the decorrelated directions to the start."""
    return merge_in_weight_space(job, progress, merge_tensor, scale=job.config.scaling)


def merge_tensor(one: Updates) -> Tensor:
    """Return the merged update of one tensor: of matrices and kernels by their directions, of others the average."""
    shape = one.updates[0].shape
    if len(shape) < 2 or not one.updates[0].numel():
        return average(one.updates, one.weights)
    return tsv([update.flatten(1) for update in one.updates]).reshape(shape)


METHOD = Method(
    name="tsv",
    title="TSV-Merge",
    source="Gargiulo et al., CVPR 2025",
    config=TsvConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE, Need.COMMON_START}),
    kind="baseline",
    any_model=True,
)
