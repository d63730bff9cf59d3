"""Small features of several clients, and their statistics."""

import torch
from torch import Tensor

from strategies.statistics.sums import Statistics

CLASSES, FEATURES = 3, 6


def examples(seed: int, count: int = 90) -> tuple[Tensor, Tensor]:
    """Return unit features [N, d] in float64 whose means depend on their labels [N]."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = centres[labels] + torch.randn(count, FEATURES, generator=rng, dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True), labels


def of(rows: Tensor, labels: Tensor) -> Statistics:
    return Statistics.of([(rows, labels)], CLASSES, rows.shape[1])


def divided(rows: Tensor, labels: Tensor, clients: int, alpha: float, seed: int = 0) -> dict[str, Statistics]:
    """Divide examples by a Dirichlet law per class; clients without examples have sums of zero."""
    shares = torch.distributions.Dirichlet(torch.full((clients,), alpha, dtype=torch.float64))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        owners = shares.sample((CLASSES,))[labels].multinomial(1).squeeze(1)
    return {f"client-{k:04d}": of(rows[owners == k], labels[owners == k]) for k in range(clients)}
