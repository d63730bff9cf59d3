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

import functools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ..core.facts import GRAM
from ..core.options import Always, config_class, option
from ..core.stage_options import max_share
from ..method import Job, Method, Outcome, Plan, Progress
from ..statistics.choice import choose_penalty, value_clients
from ..statistics.heads import LAMBDAS, Head, balance_classes, ridge_head, solve_regression
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


@config_class("ridge")
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


# Ridge regression of numbers, one or several at once, from the sums over all clients.
#
# ``Y`` takes the place of the one-hot rows. As there, the result does not depend on how the examples are divided over
# clients, the bias is not penalised, and the penalty is measured in units of the mean eigenvalue.


@dataclass(frozen=True)
class RegressionSums:
    """Sums over N examples with features f in R^d and targets y in R^m, in float64: what a client sends.

    They hold no example, but sums over few examples tell much of each. To send them: ``ArrayRecord(vars(sums))``, and
    ``RegressionSums(**record.to_torch_state_dict())`` where they arrive.

    They are sums of squares around these examples' own means, so that features far from 0 lose no digits; two sets join
    by the law of Chan, Golub and LeVeque (1979).

    Attributes:
        mean: of (f, y) [d + m].
        scatter: sum of (f - its mean) (f - its mean)^T [d, d].
        cross: sum of (y - its mean) (f - its mean)^T [m, d].
        squares: sum of (y - its mean)^2 of each target [m].
        count: N [1].

    Raises:
        ValueError: The arrays do not fit each other, or hold values that are not finite; N is no whole number >= 0.
    """

    mean: Tensor
    scatter: Tensor
    cross: Tensor
    squares: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        """Check shapes and values."""
        shapes = [list(value.shape) for value in vars(self).values()]
        m, d = (*self.squares.shape, 0)[0], (*self.scatter.shape, 0)[0]
        if shapes != [[d + m], [d, d], [m, d], [m], [1]] or d < 1 or m < 1:
            raise ValueError(
                f"mean, scatter, cross, squares and count have the shapes {shapes}: must be [d+m], [d, d], [m, d], [m] "
                "and [1]"
            )
        for entry in fields(self):
            if not torch.isfinite(getattr(self, entry.name)).all():
                raise ValueError(f"{entry.name} holds NaN or Inf: must be finite values")
        if self.examples < 0 or not self.examples.is_integer():
            raise ValueError(f"count is {self.examples:g}: must be a whole number of examples, at least 0")

    @classmethod
    def of(cls, features: Tensor, targets: Tensor) -> RegressionSums:
        """Add up examples.

        Args:
            features: [N, d] of any float type.
            targets: [N, m], or [N] for one target.

        Raises:
            ValueError: There are other numbers of rows, or values that are not finite.
        """
        rows, wanted = (
            features.double(),
            targets.double()[:, None] if targets.ndim == 1 else targets.double().flatten(1),
        )
        if rows.ndim != 2 or len(rows) != len(wanted):
            raise ValueError(
                f"features have the shape {list(features.shape)} and targets {list(targets.shape)}: must be [N, d] and "
                "[N, m], or [N]"
            )
        both = torch.cat([rows, wanted], dim=1)
        mean = both.sum(0) / max(1, len(both))
        x, y = rows - mean[: rows.shape[1]], wanted - mean[rows.shape[1] :]
        return cls(mean, x.T @ x, y.T @ x, y.square().sum(0), mean.new_tensor([len(both)]))

    def __add__(self, other: RegressionSums) -> RegressionSums:
        """Return the sums over both sets of examples."""
        count = self.count + other.count
        apart, share = other.mean - self.mean, other.count / count.clamp_min(1)
        between = _around(apart, len(self.scatter), self.count * share)
        return RegressionSums(
            self.mean + share * apart,
            self.scatter + other.scatter + between[0],
            self.cross + other.cross + between[1],
            self.squares + other.squares + between[2],
            count,
        )

    def __sub__(self, other: RegressionSums) -> RegressionSums:
        """Return the sums without those of a subset; exact but for rounding."""
        count = self.count - other.count
        mean = self.mean + other.count / count.clamp_min(1) * (self.mean - other.mean)
        share = other.count / self.count.clamp_min(1)
        between = _around(other.mean - mean, len(self.scatter), count * share)
        return RegressionSums(
            mean,
            self.scatter - other.scatter - between[0],
            self.cross - other.cross - between[1],
            self.squares - other.squares - between[2],
            count,
        )

    @property
    def examples(self) -> float:
        """N."""
        return float(self.count)

    @property
    def varies(self) -> Tensor:
        """Whether each target has a variance [m]: more than the rounding of its mean leaves of a constant."""
        return self.squares > self.count * (1e-12 * self.mean[len(self.scatter) :]).square()

    def errors(self, model: nn.Linear) -> Tensor:
        """Return a model's squared error of each target [m], summed over the examples."""
        weight, bias = model.weight.detach().double(), model.bias.detach().double()
        explained = ((weight @ self.scatter - 2.0 * self.cross) * weight).sum(1)
        apart = self.mean[len(self.scatter) :] - weight @ self.mean[: len(self.scatter)] - bias
        return (self.squares + explained).clamp_min(0.0) + self.examples * apart.square()

    def scores(self, model: nn.Linear) -> dict[str, list[float]]:
        """Return a model's scores on these examples, without seeing one.

        Returns:
            ``"rmse"``: the root of the mean squared error of each target, in its unit. ``"r2"``: 1 minus the share of
            the variance that is left, at most 1; NaN for a target without variance.
        """
        errors = self.errors(model)
        shares = torch.where(self.varies, 1.0 - errors / self.squares, torch.nan)
        return {"rmse": (errors / self.examples).sqrt().tolist(), "r2": shares.tolist()}


def _around(apart: Tensor, features: int, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what two sets whose means are apart by (f, y) add to scatter, cross and squares beside their own."""
    f, y = apart[:features], apart[features:]
    return weight * torch.outer(f, f), weight * torch.outer(y, f), weight * y.square()


def ridge_regression(clients: Iterable[RegressionSums], penalty: float = 0.0) -> nn.Linear:
    """Return the ridge regression of all clients' examples, by their sums: ``y = W f + b``.

    Minimises ``||F W^T + 1 b^T - Y||^2 + l ||W||^2`` with ``l = lambda tr(A) / d``, where A is the features' scatter
    around their mean; scikit-learn's ``alpha`` is l.

    Args:
        clients: The sums of each client.
        penalty: lambda, above 0; 0 chooses it of :data:`..statistics.heads.LAMBDAS`, by the error on each client of the
            regression of the others, where every target counts in units of its variance.

    Returns:
        A linear layer in float64, [B, d] -> [B, m].

    Raises:
        ValueError: The penalty is negative, or too small for the rounding of the sums; the clients' sums have other
            shapes; or there are too few, no client, or one where the penalty is to be chosen.
    """
    parts = [part for part in clients if part.examples]
    if not 0 <= penalty < math.inf or len(parts) < (1 if penalty else 2):
        raise ValueError(
            f"penalty is {penalty:g} for the sums of {len(parts)} clients with examples: must be above 0, or 0 for at "
            "least 2 clients"
        )
    if len({tuple(part.cross.shape) for part in parts}) > 1:
        found = ", ".join(str(list(part.cross.shape)) for part in parts)
        raise ValueError(f"the clients' sums have the shapes {found}: must be equal, of [m, d]")
    total = functools.reduce(RegressionSums.__add__, parts)
    if penalty:
        return _solve(total, penalty)
    scale = torch.where(total.varies, total.squares, 1.0)
    others = [total - part for part in parts]

    def left_out(candidate: float) -> float:
        pairs = zip(parts, others, strict=True)
        return sum(float((part.errors(_solve(rest, candidate)) / scale).sum()) for part, rest in pairs)

    return _solve(total, min(LAMBDAS, key=left_out))


def _solve(sums: RegressionSums, penalty: float) -> nn.Linear:
    weight, bias = solve_regression(sums.scatter.clone(), sums.cross.T, sums.mean, penalty)
    model = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.copy_(bias)
    return model.requires_grad_(False)
