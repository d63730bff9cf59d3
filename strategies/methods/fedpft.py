"""FedPFT: clients send a Gaussian per class of a frozen backbone's features; the server trains a head on draws of them.

Paper: Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang, Parametric Feature Transfer: One-shot Federated Learning with
    Foundation Models, 2024, https://arxiv.org/abs/2402.01862. Read version: notes on the paper, on Flower's baseline,
    and on the copy in FedCGS's code.
Symbols: n_kc, mu_kc, Sigma_kc -> statistics.moments.FeatureMoments of client k; K = 1 component per class;
    h -> the result.
Where: the clients' Gaussians -> statistics.moments.FeatureMoments.variances; the draws -> draw_features; the head
    -> train_head.
Deviations: one component, for which EM is the mean and the variance, so that n, S and the sums of squares suffice and
    clients fit nothing. They travel in float32, not float16, and with the classes that a client lacks. Features have
    norm 1; draws do not. AdamW with rate 1e-3 and a cosine over few epochs on features times sqrt(d), from a head of
    zeros; Flower's baseline has one spherical component, 1e-4 and 50 epochs, FedCGS's copy ten diagonal ones and SGD.
    Both drop a class with no more examples than components; here a class of one example has the client's mean variance.
"""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import OptionError
from ..core.facts import SQUARES
from ..core.gpu import eager
from ..core.options import config_class, option
from ..core.seeds import generator
from ..core.stage_options import max_share
from ..core.work import work
from ..distillation.epochs import learning_rate
from ..distillation.pool import shuffled_batches
from ..distillation.settings import shared
from ..method import Job, Method, Need, Outcome, Progress
from ..statistics.heads import Head
from ..statistics.moments import FeatureMoments, mean_variance, moments_from_arrays
from ..statistics.uploaded import ClientSumsOnServer, check_second, head_state


@config_class("fedpft")
class FedPftConfig:
    """Options of FedPFT."""

    covariance: str = option(
        "diagonal",
        "of the Gaussian of a class: a variance per feature, or spherical, one for all features, which needs no sums "
        "of squares",
        choices=("diagonal", "spherical"),
    )
    epochs: int = shared("epochs", 10)
    batch_size: int = option(64, "drawn features per step", low=1, setting=False)
    lr: float = option(1e-3, "learning rate of AdamW; falls to 0 on a cosine", above=0.0, setting=False)
    limit: int = option(200000, "features drawn in all; of more examples all clients draw a part in proportion", low=1)
    max_share: float = max_share()


def fit(job: Job, progress: Progress) -> Outcome:
    """Draw n_kc features of every client and class, and train the head on all of them.

    Raises:
        OptionError: The uploads carry noise.
    """
    begin = time.perf_counter()
    clients = ClientSumsOnServer(job.uploads, job.config.max_share)
    if any(clients.noises()):
        raise OptionError("method 'fedpft' cannot use sums with noise: must be 'ridge'")
    rows, labels = draw_features(clients, job.config, seed=job.seed)
    progress.record({"drawn": len(labels)})
    middle = time.perf_counter()
    head = train_head(rows.to(job.device), labels.to(job.device), job, progress)
    timings = {"draw": middle - begin, "train": time.perf_counter() - middle}
    return Outcome(student=head_state(job, head.weight, head.bias), timings=timings)


def draw_features(clients: ClientSumsOnServer, config: FedPftConfig, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ``n_kc`` features from the Gaussian of every client and class, at most ``limit`` in all.

    Each draw has its own seed, by client and class, so that no client changes another's.

    Args:
        config: The covariance, and the most features.

    Returns:
        Features [N, d] in float32 and labels [N], in the order of names and classes.
    """
    names, capped = list(clients), clients.factors
    claimed = torch.stack([capped.get(name, 1.0) * clients.arrays(name)["counts"].double() for name in names])
    numbers = numbers_within(claimed, config.limit).tolist()
    fallback = mean_variance(_moments(clients, name, config) for name in names)
    rows, labels = [], []
    for name, counts in zip(names, numbers, strict=True):
        moments = _moments(clients, name, config)
        deviations, means = moments.variances(fallback).sqrt().float(), moments.means.float()
        for c, count in enumerate(counts):
            if not count:
                continue
            noise = torch.randn(count, means.shape[1], generator=generator(seed, "fedpft", name, c))
            rows.append(means[c] + noise * deviations[c])
            labels.append(torch.full((count,), c))
    return torch.cat(rows), torch.cat(labels)


def numbers_within(claimed: Tensor, limit: int) -> Tensor:
    """Return how many features to draw of every client and class, int64 [M, C], at most ``limit`` in all.

    They are in proportion to the claimed examples, and at least 1 where there is one. If so many ones exceed the limit,
    they are spread evenly over the clients of each class.

    Args:
        claimed: Examples by client and class, not negative, float64 [M, C].
        limit: At least 1.
    """
    known, wanted = (claimed > 0).double(), claimed * min(1.0, limit / float(claimed.sum()))
    numbers = torch.maximum(wanted.round(), known)
    if float(numbers.sum()) > limit:
        least = known if float(known.sum()) <= limit else torch.zeros_like(known)
        more = (wanted - least).clamp_min(0.0)
        running = (more * ((limit - least.sum()) / more.sum())).T.flatten().cumsum(0)
        whole = (running + 1e-6).floor()  # what rounding leaves below a whole number counts as that number
        numbers = least + whole.diff(prepend=whole.new_zeros(1)).view_as(claimed.T).T
    return numbers.long()


def _moments(clients: ClientSumsOnServer, name: str, config: FedPftConfig) -> FeatureMoments:
    arrays = clients.arrays(name)
    if config.covariance == "spherical":
        arrays = {key: value for key, value in arrays.items() if key != SQUARES}
    return moments_from_arrays(arrays)


def train_head(rows: Tensor, labels: Tensor, job: Job, progress: Progress) -> Head:
    """Return a softmax head, trained by AdamW from zeros.

    Args:
        rows: Features [N, d] in float32; times sqrt(d) their deviation is near 1.
        labels: Classes [N].
    """
    config, scale = job.config, math.sqrt(rows.shape[1])
    weight = torch.zeros(job.num_classes, rows.shape[1], device=rows.device, requires_grad=True)
    bias = torch.zeros(job.num_classes, device=rows.device, requires_grad=True)
    optimizer = eager(torch.optim.AdamW)([weight, bias], config.lr)
    for epoch in range(config.epochs):
        lr, losses = learning_rate("cosine", config.lr, epoch, config.epochs), []
        optimizer.param_groups[0]["lr"] = lr
        rng = generator(job.seed, "fedpft", "epoch", epoch)
        for batch in shuffled_batches({"rows": rows, "labels": labels}, config.batch_size, rng):
            loss = F.cross_entropy(F.linear(scale * batch["rows"], weight, bias), batch["labels"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            work().student_steps += 1
            losses.append(loss.detach())
        values = {"loss": float(torch.stack(losses).mean())}
        progress.record({"epoch": epoch + 1, **values})
        progress.report(epoch + 1, config.epochs, values)
    return Head((scale * weight).detach().cpu().double(), bias.detach().cpu().double())


def check_uploads(job: Job) -> None:
    """Refuse uploads without sums of squares, unless the Gaussians are spherical; uploads may still be missing."""
    if job.config.covariance == "diagonal":
        check_second(job, "fedpft", SQUARES)


METHOD = Method(
    name="fedpft",
    title="FedPFT",
    source="Beitollahi et al., 2024",
    config=FedPftConfig,
    fit=fit,
    needs=frozenset({Need.EXACT_SUMS}),
    uploads="statistics",
    check=check_uploads,
)
