"""A federation that trains in seconds: scikit-learn's digits, divided unevenly among some clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

TRAIN = 1297  # of 1797 images; the other 500 are for testing


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return all images, normalised to [-1, 1], [1797, 1, 8, 8], and their classes [1797]."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    return 2 * images - 1, torch.tensor(bunch.target)


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor]) -> float:
    """Return the share of test images that a model puts into the right class, in percent; a module in eval mode."""
    if isinstance(model, nn.Module):
        model.eval()
    images, labels = digits()
    return 100 * float((model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean())


def digits_clients(
    build: Callable[[], nn.Module], *, clients: int, alpha: float, seed: int, epochs: int
) -> list[dict[str, Tensor]]:
    """Train clients from one start, plain SGD at batch 32; each class is divided by Dirichlet(alpha).

    Returns:
        Their weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = build().state_dict()
        parts = _divide(clients, alpha, seed)
        return [_trained(build(), start, torch.from_numpy(part), epochs) for part in parts]


def _divide(clients: int, alpha: float, seed: int) -> list[np.typing.NDArray[np.int64]]:
    rng, labels = np.random.default_rng(seed), digits()[1][:TRAIN].numpy()
    while True:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in range(10):
            rows = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.floor(np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(rows)).astype(int)
            for part, piece in zip(parts, np.split(rows, cuts), strict=True):
                part.extend(piece.tolist())
        if min(map(len, parts)) >= 10:
            return [np.array(part) for part in parts]


def _trained(model: nn.Module, start: dict[str, Tensor], rows: Tensor, epochs: int) -> dict[str, Tensor]:
    model.load_state_dict(start)
    images, labels = digits()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    for _ in range(epochs):
        for chosen in torch.split(rows[torch.randperm(len(rows))], 32):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
    return model.state_dict()
