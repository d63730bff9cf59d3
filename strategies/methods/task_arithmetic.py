"""Task arithmetic: the mean of the clients' updates, scaled, is added to the start.

Paper: Ilharco, Ribeiro, Wortsman, Gururangan, Schmidt, Hajishirzi, Farhadi, Editing Models with Task Arithmetic, ICLR
    2023, https://arxiv.org/abs/2212.04089. Read version: the abstract, and descriptions of the rule.
Symbols: theta_0 -> common_start; tau_k = theta_k - theta_0 -> Updates.updates; the scaling term lambda -> scaling.
Where: the sum of task vectors -> weights.rules.average; the loop over tensors -> weights.states.merge_states.
Deviations: the updates are weighted by the clients' numbers of examples, which sum to 1, so that a scaling of 1 gives
    FedAvg; the paper adds them. Statistics of batch normalisation are pooled and never scaled.
"""

from __future__ import annotations

from ..core.options import config_class
from ..method import Job, Method, Need, Outcome, Progress
from ..teacher.weight_space import merge_in_weight_space, scaling
from ..weights.states import mean


@config_class("task-arithmetic")
class TaskArithmeticConfig:
    """Options of task arithmetic."""

    scaling: float = scaling()


def fit(job: Job, progress: Progress) -> Outcome:
    """Add the mean update to the start."""
    return merge_in_weight_space(job, progress, mean, scale=job.config.scaling)


METHOD = Method(
    name="task-arithmetic",
    title="Task arithmetic",
    source="Ilharco et al., ICLR 2023",
    config=TaskArithmeticConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE, Need.COMMON_START}),
    kind="baseline",
    any_model=True,
)
