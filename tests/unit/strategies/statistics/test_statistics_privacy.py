import math
from collections.abc import Callable

import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, examples, of
from torch import Tensor

from strategies.statistics.privacy import (
    COUNT_WEIGHT,
    SUM_WEIGHT,
    log_delta,
    noise_for,
    normalize_features,
    release_sums,
    sensitivity,
    spent_epsilon,
)
from strategies.statistics.sums import Statistics


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
    assert spent_epsilon([], 1e-5) == 0.0
    assert spent_epsilon([mu], 1e-5) == pytest.approx(1.0)
    assert 1.0 < spent_epsilon([mu, mu], 1e-5) < 2.0


def moved(rows: Tensor, labels: Tensor, added: Tensor, label: int, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """Return how far one more example moves the vector that gets the noise."""
    more = of(norm(torch.cat([rows, added[None]])), torch.cat([labels, torch.tensor([label])]))
    change = more - of(norm(rows), labels)
    off = torch.triu(change.gram, 1).square().sum() * 2 + change.gram.diagonal().square().sum()
    return (off + SUM_WEIGHT**2 * change.sums.square().sum() + COUNT_WEIGHT**2 * change.counts.square().sum()).sqrt()


def worst_neighbour(norm: Callable[[Tensor], Tensor]) -> tuple[float, Tensor, int]:
    """Search for the example that moves the vector most: gradient ascent from starts of any size, for every class."""
    rows, labels = examples(0, 20)
    worst = 0.0, torch.zeros(FEATURES), 0
    for seed in range(0, 12, 2):
        rng = torch.Generator().manual_seed(seed)
        added = torch.randn(FEATURES, generator=rng, dtype=torch.float64) * 10.0 ** (seed - 6)
        added.requires_grad_()
        optimizer = torch.optim.Adam([added], 0.1 * 10.0 ** (seed - 6))
        for _ in range(15):
            far = moved(rows, labels, added, seed % CLASSES, norm)
            worst = max(worst, (float(far), added.detach().clone(), seed % CLASSES), key=lambda found: found[0])
            optimizer.zero_grad()
            (-far).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return worst


def test_search_for_the_worst_neighbour_finds_the_sensitivity_and_no_more() -> None:
    found = worst_neighbour(normalize_features)[0]
    assert 0.9999 * sensitivity() < found <= sensitivity()
    assert worst_neighbour(lambda rows: rows)[0] > 1e6  # the search finds what a missing bound permits


def test_noise_hides_the_worst_neighbour_as_far_as_the_budget_says_and_not_much_further() -> None:
    epsilon, delta, draws = 0.5, 0.1, 600
    (rows, labels), (_, added, label) = examples(0, 20), worst_neighbour(normalize_features)
    sums = [of(normalize_features(rows), labels)]
    more = normalize_features(torch.cat([rows, added[None]]))
    sums.append(of(more, torch.cat([labels, torch.tensor([label])])))
    change = sums[1] - sums[0]

    def likeness(given: Statistics) -> float:
        """Return the projection on the change, the best test of the two, in units of the sensitivity."""
        seen = given - sums[0]
        inner = (seen.gram * change.gram).sum() + SUM_WEIGHT**2 * (seen.sums * change.sums).sum()
        return float(inner + COUNT_WEIGHT**2 * seen.counts @ change.counts) / sensitivity() ** 2

    without, with_it = (
        torch.tensor([likeness(release_sums(own, epsilon, delta)) for _ in range(draws)], dtype=torch.float64)
        for own in sums
    )
    noise = noise_for(epsilon, delta)
    assert float(with_it.mean() - without.mean()) == pytest.approx(1.0, abs=5 * noise * math.sqrt(2 / draws))
    assert float((with_it.var() / 2 + without.var() / 2).sqrt()) == pytest.approx(noise, rel=2.5 / math.sqrt(draws))
    threshold = 0.5 + epsilon * noise**2  # where the densities differ by the factor e^epsilon
    shares = [float((found > threshold).double().mean()) for found in (with_it, without)]
    spread = math.sqrt((shares[0] + math.exp(2 * epsilon) * shares[1]) / draws)
    assert shares[0] - math.exp(epsilon) * shares[1] == pytest.approx(delta, abs=5 * spread)


def test_normalised_rows_are_never_longer_than_one_and_zero_stays() -> None:
    rows = torch.randn(1000, 7) * 1e-20
    rows[0] = 0
    norms = normalize_features(rows).norm(dim=1)
    assert norms[0] == 0
    assert float(norms[1:].min()) > 0.99999
    assert float(norms.max()) < 1.0


def test_noise_has_the_calibrated_deviation_in_every_part_and_is_fresh() -> None:
    zero = of(torch.zeros(1, 60, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    drawn = [release_sums(zero, 1.0, 1e-5) for _ in range(40)]
    scale = noise_for(1.0, 1e-5) * sensitivity()
    upper = torch.stack([one.gram[torch.triu(torch.ones(60, 60), 1) > 0] for one in drawn])
    diagonal = torch.stack([one.gram.diagonal() for one in drawn])
    sums = torch.stack([one.sums for one in drawn])
    assert float(upper.std()) == pytest.approx(scale / math.sqrt(2), rel=0.02)
    assert float(diagonal.std()) == pytest.approx(scale, rel=0.08)
    assert float(sums.std()) == pytest.approx(scale / SUM_WEIGHT, rel=0.04)
    assert torch.equal(drawn[0].gram, drawn[0].gram.T)
    assert not torch.equal(drawn[0].gram, drawn[1].gram)


def test_neighbouring_counts_can_give_the_same_noisy_ones_to_the_last_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, zeros = torch.arange(50, dtype=torch.float64), torch.zeros(50, 2, dtype=torch.float64)
    own, neighbour = (Statistics(each, zeros, zeros[:2]) for each in (counts, counts + 1))
    told = release_sums(own, 1.0, 1e-5).counts
    deviation = noise_for(1.0, 1e-5) * sensitivity() / COUNT_WEIGHT

    def nearest(*shape: int) -> Tensor:
        """Return the noise, as Box and Muller draw it, that brings the neighbour's counts nearest to the told ones."""
        if shape != told.shape:
            return torch.zeros(shape, dtype=torch.float64)
        wanted = (told - neighbour.counts) / deviation
        uniform = (torch.exp(-(wanted**2) / 2.0) * 2.0**53).round() * 2.0**-53
        return torch.sign(wanted) * torch.sqrt(-2.0 * torch.log(uniform))  # at the angles 0 and pi

    monkeypatch.setattr("strategies.statistics.privacy.system_normal", nearest)
    assert not torch.equal(neighbour.counts + nearest(*told.shape) * deviation, told)
    assert torch.equal(release_sums(neighbour, 1.0, 1e-5).counts, told)
