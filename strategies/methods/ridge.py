"""Ridge regression on a frozen backbone's features, solved from the clients' sums: the same head for every split.

Paper: He, Tong, Fang, Sun, Zeng, Li, Chen, Chen, AFL: A Single-Round Analytic Approach for Federated Learning with
    Pre-trained Models, CVPR 2025, https://arxiv.org/abs/2405.16240; Fani, Camoriano, Caputo, Ciccone, Accelerating
    Heterogeneous Federated Learning with Closed-form Classifiers (Fed3R), ICML 2024, https://arxiv.org/abs/2406.01116.
    Read version: notes on both papers and on AFL's code.
Symbols: G_k, S_k, n_k -> the upload of client k; lambda -> penalty; A -> Statistics.scatter; W, b -> the result.
Where: the solution -> statistics.heads.Ridge; the choice of lambda -> statistics.choice.choose_penalty; the value of
    clients -> statistics.choice.value_clients.
Deviations: AFL's pairwise law is replaced by the sum, to which it is equal. The bias is not penalised, lambda is in
    units of the mean eigenvalue, features have norm 1, and lambda is chosen by leaving clients out. With noise in the
    sums lambda follows from the noise, and there is no bias.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.facts import GRAM
from ..core.options import Always, check, option
from ..core.stage_options import max_share
from ..method import Job, Method, Outcome, Plan, Progress
from ..statistics.choice import choose_penalty, value_clients
from ..statistics.heads import Head, balance_classes, ridge_head
from ..statistics.sums import Statistics
from ..statistics.uploaded import ClientSumsOnServer, check_second, head_state

# The ridge head of sums with noise, whose penalty follows from the noise alone.


def noisy_head(total: Statistics, noises: Sequence[float]) -> Head:
    """Return the head of noisy sums: all of it is post-processing, which spends no privacy.

    Negative eigenvalues of G become 0. The penalty ``l = sqrt(2 d sum_k sigma_k^2)`` is the edge of the noise's
    spectrum, because off-diagonal entries of G have the deviation ``sigma_k / sqrt(2)``. There is no bias: features of
    norm 1 that are not centred carry one.

    Args:
        noises: sigma_k of every client, the deviation on the diagonal of G.
    """
    edge = math.sqrt(2.0 * total.features * sum(noise**2 for noise in noises))
    values, vectors = torch.linalg.eigh(total.gram)
    weight = vectors @ ((vectors.T @ total.sums.T) / (values.clamp_min(0.0) + edge)[:, None])
    return Head(weight.T.contiguous(), torch.zeros(total.classes, dtype=torch.float64))


@dataclass(frozen=True)
class RidgeConfig:
    """Options of ridge regression."""

    penalty: float = option(
        0.0, "lambda, in units of the features' mean eigenvalue; 0 = chosen by leaving clients out", low=0.0
    )
    balance: str = option(
        "none",
        "scores standardises every class's scores, for long tails and a balanced test",
        choices=("none", "scores"),
        setting=False,
    )
    max_share: float = max_share()
    values: bool = option(
        False,
        "measure what each client is worth to the others; K clients take K (K - 1) / 2 solves, above 20 clients 10 K",
    )

    def __post_init__(self) -> None:
        check(self, "ridge")


def fit(job: Job, progress: Progress) -> Outcome:
    """Add up the uploads, choose lambda, and solve the head."""
    begin = time.perf_counter()
    clients = ClientSumsOnServer(job.uploads, job.config.max_share)
    if any(clients.noises()):
        head = noisy_head(Statistics.total(clients.values()), clients.noises())
        exact, usual = ("penalty", "balance", "values"), RidgeConfig()
        unread = [f"'ridge.{name}'" for name in exact if getattr(job.config, name) != getattr(usual, name)]
        without = f"; settings without effect are {', '.join(unread)}" if unread else ""
        progress.record({"note": f"the uploads carry noise, which fixes lambda{without}"})
    else:
        head = _exact(job, progress, clients)
    progress.report(1, 1)
    return Outcome(student=head_state(job, head.weight, head.bias), timings={"solve": time.perf_counter() - begin})


def _exact(job: Job, progress: Progress, clients: ClientSumsOnServer) -> Head:
    config, penalty = job.config, job.config.penalty
    if not penalty:
        choice = choose_penalty(clients, seed=job.seed)
        penalty = choice.value
        choice.record(progress, "lambda")
    progress.record({"chosen_lambda": penalty})
    if config.values and len(clients) >= 3:
        for name, value in value_clients(clients, penalty, seed=job.seed).items():
            progress.record({"client": name, "value": value})
    total = Statistics.total(clients.values())
    head = ridge_head(total, penalty)
    return balance_classes(head, total.counts) if config.balance == "scores" else head


def check_uploads(job: Job) -> None:
    """Refuse uploads without Gram matrices; uploads may still be missing."""
    check_second(job, "ridge", GRAM)


METHOD = Method(
    name="ridge",
    title="Ridge on features",
    source="He et al., CVPR 2025; Fani et al., ICML 2024",
    config=RidgeConfig,
    fit=fit,
    uploads="statistics",
    check=check_uploads,
    plan=Always(Plan(random=False)),
)
