import math

import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, examples, of

from strategies.statistics.privacy import (
    COUNT_WEIGHT,
    SUM_WEIGHT,
    log_delta,
    noise_for,
    normalised,
    released,
    sensitivity,
    spent,
)


@pytest.mark.parametrize(("epsilon", "noise"), [(1.0, 3.731), (2.0, 1.994), (4.0, 1.081), (8.0, 0.600)])
def test_noise_is_the_exact_calibration(epsilon: float, noise: float) -> None:
    found = noise_for(epsilon, 1e-5)
    assert found == pytest.approx(noise, abs=6e-4)
    assert log_delta(epsilon, found) <= math.log(1e-5) < log_delta(epsilon, found * (1 - 1e-6))


def test_delta_is_that_of_the_two_gaussians_by_integration() -> None:
    noise, epsilon = 0.9, 1.3
    grid = torch.linspace(-12, 13, 200001, dtype=torch.float64)
    one, other = (torch.distributions.Normal(mean, noise).log_prob(grid).exp() for mean in (1.0, 0.0))
    wanted = float((one - math.exp(epsilon) * other).clamp_min(0).sum() * (grid[1] - grid[0]))
    assert math.exp(log_delta(epsilon, noise)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (-1.0, 0.5)])
def test_a_budget_out_of_range_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match="must be greater than 0"):
        noise_for(epsilon, delta)


def test_mechanisms_compose_exactly_and_none_costs_nothing() -> None:
    mu = 1.0 / noise_for(1.0, 1e-5)
    assert spent([], 1e-5) == 0.0
    assert spent([mu], 1e-5) == pytest.approx(1.0)
    assert 1.0 < spent([mu, mu], 1e-5) < 2.0


def test_sensitivity_bounds_the_worst_neighbour_that_a_search_finds() -> None:
    rows, labels = examples(0)
    rows = rows.requires_grad_(False)
    worst = 0.0
    for seed in range(200):
        scale = 10.0 ** torch.randint(-3, 4, (1,), generator=torch.Generator().manual_seed(seed)).item()
        added = torch.randn(1, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
        label = torch.tensor([seed % CLASSES])
        first = of(normalised(rows), labels)
        second = of(normalised(torch.cat([rows, added])), torch.cat([labels, label]))
        change = second - first
        off = torch.triu(change.gram, 1).square().sum() * 2 + change.gram.diagonal().square().sum()
        moved = off + SUM_WEIGHT**2 * change.sums.square().sum() + COUNT_WEIGHT**2 * change.counts.square().sum()
        worst = max(worst, float(moved.sqrt()))
    assert 0.999 * sensitivity() < worst <= sensitivity()


def test_normalised_rows_are_never_longer_than_one_and_zero_stays() -> None:
    rows = torch.randn(1000, 7) * 1e-20
    rows[0] = 0
    norms = normalised(rows).norm(dim=1)
    assert norms[0] == 0
    assert float(norms[1:].min()) > 0.99999
    assert float(norms.max()) < 1.0


def test_noise_has_the_calibrated_deviation_in_every_part_and_is_fresh() -> None:
    zero = of(torch.zeros(1, 60, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    drawn = [released(zero, 1.0, 1e-5) for _ in range(40)]
    scale = noise_for(1.0, 1e-5) * sensitivity()
    upper = torch.stack([one.gram[torch.triu(torch.ones(60, 60), 1) > 0] for one in drawn])
    diagonal = torch.stack([one.gram.diagonal() for one in drawn])
    sums = torch.stack([one.sums for one in drawn])
    assert float(upper.std()) == pytest.approx(scale / math.sqrt(2), rel=0.02)
    assert float(diagonal.std()) == pytest.approx(scale, rel=0.08)
    assert float(sums.std()) == pytest.approx(scale / SUM_WEIGHT, rel=0.04)
    assert torch.equal(drawn[0].gram, drawn[0].gram.T)
    assert not torch.equal(drawn[0].gram, drawn[1].gram)
