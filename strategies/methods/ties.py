"""TIES: small changes are reset, signs are elected, and the changes that agree are averaged.

Paper: Yadav, Tam, Choshen, Raffel, Bansal, TIES-Merging: Resolving Interference When Merging Models, NeurIPS 2023,
    https://arxiv.org/abs/2306.01708. Read version: the abstract, and descriptions of the rule.
Symbols: theta_init -> common_start; tau_t -> Updates.updates; k % -> density, as a share; lambda -> scaling.
Where: Algorithm 1 -> weights.rules.ties and trim; the loop over tensors -> weights.states.merge_states.
    ``aligned``: Stoica et al., Model merging with SVD to tie the Knots, ICLR 2025, https://arxiv.org/abs/2410.19735,
    Section 4 -> weights.lora.merge_aligned.
Deviations: each tensor keeps its share of entries, where the paper trims the model as one vector. Where signs cancel,
    the result is 0. Statistics of batch normalisation are pooled and never scaled.
"""

from __future__ import annotations

from torch import Tensor

from ..core.options import config_class, option
from ..method import Job, Method, Need, Outcome, Progress
from ..teacher.weight_space import merge_in_weight_space, scaling
from ..weights.adapters import Aligned
from ..weights.rules import ties
from ..weights.states import Updates


@config_class("ties")
class TiesConfig:
    """Options of TIES."""

    density: float = option(
        0.2, "share of each tensor's entries that a client keeps, the largest, d", above=0.0, high=1.0
    )
    aligned: bool = option(
        False, "entries of a matrix are those of the updates in their common basis, from an SVD of all of them (KnOTS)"
    )
    scaling: float = scaling()


def fit(job: Job, progress: Progress) -> Outcome:
    """Trim, elect, and average what agrees."""
    config = job.config

    def rule(one: Updates) -> Tensor:
        return ties(one.updates, config.density)

    return merge_in_weight_space(job, progress, Aligned(rule) if config.aligned else rule, scale=config.scaling)


METHOD = Method(
    name="ties",
    title="TIES",
    source="Yadav et al., NeurIPS 2023",
    config=TiesConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE, Need.COMMON_START}),
    kind="baseline",
    any_model=True,
)
