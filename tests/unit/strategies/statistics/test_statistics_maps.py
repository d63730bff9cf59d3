"""The fixed random map: its form, its invariance, what a linear head cannot do, and the sensitivity after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from statistics_fakes import CLASSES, divided

from strategies.core.seeds import derive_seed
from strategies.statistics.heads import Lda, Ridge
from strategies.statistics.maps import ReluMap
from strategies.statistics.privacy import COUNT_WEIGHT, SUM_WEIGHT, normalised, sensitivity
from strategies.statistics.sums import Statistics

WIDTH = 96


def rings(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points [N, 3] of norm 1 whose class is the product of two signs, which no linear head tells."""
    rng = torch.Generator().manual_seed(seed)
    points = normalised(torch.randn(count, 3, generator=rng, dtype=torch.float64))
    return points, (points[:, 0] * points[:, 1] > 0).long()


def mapped(rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return normalised(ReluMap.of(rows.shape[1], WIDTH, seed)(rows))


def test_the_map_is_numpys_from_the_seed_and_leaves_zeros() -> None:
    rows = torch.cat([rings(0, 20)[0], torch.zeros(1, 3, dtype=torch.float64)])
    rng = np.random.Generator(np.random.PCG64(derive_seed(7, "features", "map")))
    weight, bias = rng.standard_normal((3, WIDTH)), rng.standard_normal(WIDTH)
    found = ReluMap.of(3, WIDTH, 7)(rows).numpy()
    np.testing.assert_allclose(found[:20], np.maximum(rows.numpy()[:20] @ weight + bias, 0.0), atol=1e-12)
    assert not found[20].any()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 100.0])
@pytest.mark.parametrize("clients", [1, 10, 300])
def test_heads_on_mapped_features_are_those_of_all_examples_for_every_division(alpha: float, clients: int) -> None:
    rows, labels = rings(1, 900)
    parts = divided(mapped(rows), labels, clients, alpha)
    whole, total = Statistics.of([(mapped(rows), labels)], CLASSES, WIDTH), Statistics.total(parts.values())
    for one, other in (
        (Ridge(whole).head(0.01), Ridge(total).head(0.01)),
        (Lda(whole).head(0.1), Lda(total).head(0.1)),
    ):
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(one.bias, other.bias, rtol=1e-8, atol=1e-8)


def test_no_example_changes_the_sums_of_mapped_features_by_more_than_the_sensitivity() -> None:
    rows = mapped(torch.cat([rings(4, 3000)[0], torch.eye(3, dtype=torch.float64), -torch.eye(3, dtype=torch.float64)]))
    norms = rows.norm(dim=1)
    assert float(norms.max()) < 1.0
    most = (norms**4 + SUM_WEIGHT**2 * norms**2 + COUNT_WEIGHT**2).sqrt()  # of (f f^T, 2 f, 0.1)
    assert sensitivity() - 1e-4 < float(most.max()) <= sensitivity()
