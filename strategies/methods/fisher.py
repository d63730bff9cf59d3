"""Fisher merging: each number of a model is averaged with the weight that its clients' examples give it.

Paper: Matena, Raffel, Merging Models with Fisher-Weighted Averaging, NeurIPS 2022, https://arxiv.org/abs/2111.09832.
    Read version: the abstract, and descriptions of the rule.
Symbols: theta_i -> Updates.updates, without a start; F_i -> Updates.measured of "fisher:"; lambda_i -> Updates.weights.
Where: the closed form -> weights.rules.fisher; F_i -> client.measures.fisher_diagonal, on the clients; the loop over
    tensors -> weights.states.merge_states.
Deviations: F_i takes the labels of the client's examples, not labels drawn from its model. It is floored by a share of
    the tensor's largest entry. Frozen tensors are averaged. Statistics of batch normalisation are pooled.
"""

from __future__ import annotations

from torch import Tensor

from ..core.facts import FISHER_OF
from ..core.options import Always, config_class
from ..method import ClientAsks, Job, Method, Need, Outcome, Plan, Progress
from ..teacher.weight_space import Measure, merge_in_weight_space
from ..weights.rules import average, fisher
from ..weights.states import Updates

MEASURE = Measure("fisher", "fisher_diagonal", (FISHER_OF,))


@config_class("fisher")
class FisherConfig:
    """Options of Fisher merging: none."""


def fit(job: Job, progress: Progress) -> Outcome:
    """Average by the clients' Fisher diagonals."""
    return merge_in_weight_space(job, progress, merge_tensor, of_updates=False, weighs=MEASURE)


def merge_tensor(one: Updates) -> Tensor:
    """Return one tensor's weighted average; without a diagonal, by numbers of examples."""
    diagonals = one.measured(f"{FISHER_OF}{one.name}")
    return fisher(one.updates, one.weights, diagonals) if diagonals else average(one.updates, one.weights)


METHOD = Method(
    name="fisher",
    title="Fisher merging",
    source="Matena and Raffel, NeurIPS 2022",
    config=FisherConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE}),
    kind="baseline",
    plan=Always(Plan(asks=ClientAsks(sums="fisher"))),
    any_model=True,
)
