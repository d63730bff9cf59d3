"""DARE: random entries of the clients' updates are dropped and the others rescaled, before any rule merges them.

Paper: Yu, Yu, Yu, Huang, Li, Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free
    Lunch, ICML 2024, https://arxiv.org/abs/2311.03099. Read version: the abstract, and descriptions of the rule.
Symbols: delta^t -> Updates.updates; p -> drop; lambda -> scaling.
Where: drop and rescale -> weights.rules.drop_and_rescale; the rules -> weights.rules.
Deviations: each draw follows from the seed, the client and the tensor's name, so that no order matters. Statistics of
    batch normalisation are pooled, neither dropped nor scaled.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..core.options import Always, config_class, option
from ..core.seeds import generator
from ..method import Job, Method, Need, Outcome, Plan, Progress
from ..teacher.weight_space import merge_in_weight_space, scaling
from ..weights.rules import average, drop_and_rescale, ties
from ..weights.states import Updates
from .tsv import merge_tensor


@config_class("dare")
class DareConfig:
    """Options of DARE."""

    drop: float = option(0.5, "probability that an entry of a client's update is dropped, p", low=0.0, high=0.99)
    rule: str = option("average", "the rule that merges what is left", choices=("average", "ties", "tsv"))
    density: float = option(0.2, "share of entries that a client keeps with the rule ties, d", above=0.0, high=1.0)
    scaling: float = scaling()


def fit(job: Job, progress: Progress) -> Outcome:
    """Drop, rescale, and merge."""
    config = job.config

    def rule(one: Updates) -> Tensor:
        left = [
            drop_and_rescale(update, config.drop, generator(job.seed, "dare", client, one.name))
            for update, client in zip(one.updates, one.clients, strict=True)
        ]
        if config.rule == "ties":
            return ties(left, config.density)
        return merge_tensor(replace(one, updates=left)) if config.rule == "tsv" else average(left, one.weights)

    return merge_in_weight_space(job, progress, rule, scale=config.scaling)


METHOD = Method(
    name="dare",
    title="DARE",
    source="Yu et al., ICML 2024",
    config=DareConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE, Need.COMMON_START}),
    kind="baseline",
    plan=Always(Plan(random=True)),
    any_model=True,
)
