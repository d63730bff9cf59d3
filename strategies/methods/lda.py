"""Linear discriminant analysis of a frozen backbone's features, from the clients' sums: the same head for every split.

Paper: Guan, Zhou, Gu, Capture Global Feature Statistics for One-Shot Federated Learning (FedCGS), AAAI 2025,
    https://arxiv.org/abs/2503.06962; Turazza, Picone, Mamei, GH-OFL, ICLR 2026. Read version: notes on both papers and
    on their code.
Symbols: G_k, S_k, n_k -> the upload of client k; a -> shrinkage; Sigma -> scatter_within / freedom of Statistics.
Where: the discriminant -> statistics.heads.Lda; the choice of a -> statistics.choice.choose_shrinkage.
Deviations: the covariance within classes, as in GH-OFL; FedCGS takes the total one. The shrinkage is chosen by leaving
    clients out; GH-OFL has 0.05, FedCGS none. Features have norm 1. Sums with noise are refused.
"""

from __future__ import annotations

import time

from ..core.errors import OptionError
from ..core.facts import GRAM
from ..core.options import Always, config_class, option
from ..core.stage_options import max_share
from ..method import Job, Method, Need, Outcome, Plan, Progress
from ..statistics.choice import choose_shrinkage
from ..statistics.heads import Lda
from ..statistics.sums import Statistics
from ..statistics.uploaded import ClientSumsOnServer, check_second, head_state


@config_class("lda")
class LdaConfig:
    """Options of linear discriminant analysis."""

    shrinkage: float = option(0.0, "shrinkage a; 0 = chosen by leaving clients out", low=0.0, high=1.0)
    prior: str = option(
        "counts", "class frequencies: counts, or uniform for a balanced test", choices=("counts", "uniform")
    )
    max_share: float = max_share()


def fit(job: Job, progress: Progress) -> Outcome:
    """Add up the uploads, choose the shrinkage, and solve the head.

    Raises:
        OptionError: The uploads carry noise.
    """
    begin = time.perf_counter()
    config, clients = job.config, ClientSumsOnServer(job.uploads, job.config.max_share)
    if any(clients.noises()):
        raise OptionError("method 'lda' cannot use sums with noise: must be 'ridge', which is better there")
    shrinkage = config.shrinkage
    if not shrinkage:
        choice = choose_shrinkage(clients, seed=job.seed)
        shrinkage = choice.value
        choice.record(progress, "shrinkage")
    progress.record({"chosen_shrinkage": shrinkage})
    head = Lda(Statistics.total(clients.values())).head(shrinkage, prior=config.prior)
    progress.report(1, 1)
    return Outcome(student=head_state(job, head.weight, head.bias), timings={"solve": time.perf_counter() - begin})


def check_uploads(job: Job) -> None:
    """Refuse uploads without Gram matrices; uploads may still be missing."""
    check_second(job, "lda", GRAM)


METHOD = Method(
    name="lda",
    title="LDA on features",
    source="Guan et al., AAAI 2025; Turazza et al., ICLR 2026",
    config=LdaConfig,
    fit=fit,
    needs=frozenset({Need.EXACT_SUMS}),
    uploads="statistics",
    check=check_uploads,
    plan=Always(Plan(random=False)),
)
