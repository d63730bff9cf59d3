"""RegMean: each linear layer is the one that comes closest to all clients' layers on their own inputs.

Paper: Jin, Ren, Preotiuc-Pietro, Cheng, Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023,
    https://arxiv.org/abs/2212.09849. Read version: the abstract, and descriptions of the rule.
Symbols: W_i -> Updates.updates, without a start; G_i = X_i^T X_i -> Updates.measured of "gram:"; alpha -> off_diagonal.
Where: the closed form -> weights.rules.regmean; G_i -> client.measures.gram_matrices, on the clients; the loop over
    tensors -> weights.states.merge_states.
Deviations: the bias is merged with its layer, by a constant input. A small ridge on both sides averages inputs that no
    client has. Layers of more than 4,096 inputs are averaged as other tensors are, by numbers of examples. Statistics
    of batch normalisation are pooled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.facts import GRAM_OF, GRAM_OF_ROWS, name_in
from ..core.options import Always, config_class, option
from ..method import ClientAsks, Job, Method, Need, Outcome, Plan, Progress
from ..teacher.weight_space import Measure, merge_in_weight_space
from ..weights.rules import average, regmean
from ..weights.states import Updates

MEASURE = Measure("regmean", "gram_matrices", (GRAM_OF, GRAM_OF_ROWS))


@config_class("regmean")
class RegMeanConfig:
    """Options of RegMean."""

    off_diagonal: float = option(0.9, "factor of Gram matrices off their diagonals, alpha", low=0.0, high=1.0)


def fit(job: Job, progress: Progress) -> Outcome:
    """Merge linear layers by the clients' Gram matrices, and average the rest."""

    def rule(one: Updates) -> Tensor:
        return merge_tensor(one, job.config.off_diagonal)

    return merge_in_weight_space(job, progress, rule, of_updates=False, weighs=MEASURE)


def merge_tensor(one: Updates, off_diagonal: float) -> Tensor:
    """Return a linear layer's merged weight or bias; the average of another tensor."""
    layer, _, part = one.name.rpartition(".")
    grams, rows_first = one.measured(f"{GRAM_OF}{layer}"), False
    if not grams and (grams := one.measured(f"{GRAM_OF_ROWS}{layer}")):
        rows_first = True
    if part not in ("weight", "bias") or not grams:
        return average(one.updates, one.weights)
    weights = one.other(name_in(layer, "weight"))
    whole = [weight.T if rows_first else weight for weight in weights]
    width = whole[0].shape[1]
    if len(grams[0]) > width:
        biases = one.other(name_in(layer, "bias"))
        whole = [torch.cat([weight, bias[:, None]], dim=1) for weight, bias in zip(whole, biases, strict=True)]
    merged = regmean(whole, one.weights, grams, off_diagonal)
    if part == "bias":
        return merged[:, -1] if len(grams[0]) > width else average(one.updates, one.weights)
    return merged[:, :width].T if rows_first else merged[:, :width]


METHOD = Method(
    name="regmean",
    title="RegMean",
    source="Jin et al., ICLR 2023",
    config=RegMeanConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE}),
    kind="baseline",
    plan=Always(Plan(asks=ClientAsks(sums="gram"))),
    any_model=True,
)
