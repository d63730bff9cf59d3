"""The checks of an upload of sums, with and without noise, and the cap on a client's claimed share."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, examples, of
from torch import Tensor

from strategies.core.errors import UploadError
from strategies.statistics.privacy import deviation, released
from strategies.statistics.sums import Statistics
from strategies.statistics.uploaded import FeatureSums, capped

FINGERPRINT = torch.zeros(4, 32, dtype=torch.uint8)
SIGMA = deviation(1.0, 1e-5)


def sent(statistics: Statistics, noise: float) -> dict[str, Tensor]:
    model = FeatureSums(CLASSES, FEATURES, FINGERPRINT)
    model.fill(statistics, noise)
    return dict(model.state_dict())


def check(statistics: Statistics, *, told: float = SIGMA, demanded: float = SIGMA) -> None:
    FeatureSums(CLASSES, FEATURES, FINGERPRINT, noise=demanded).check_upload(sent(statistics, told))


@pytest.mark.parametrize("count", [1, 90, 5000])
def test_honest_noisy_sums_pass_every_bound(count: int) -> None:
    exact = of(*examples(0, count))
    for _ in range(50):
        check(released(exact, 1.0, 1e-5))


@pytest.mark.parametrize(("told", "demanded"), [(1e6, 0.0), (-1.0, 0.0), (0.0, SIGMA), (2 * SIGMA, SIGMA)])
def test_noise_is_that_of_the_budget_and_no_way_around_the_bounds(told: float, demanded: float) -> None:
    with pytest.raises(UploadError, match=re.escape(f"noise is {told:.6g}: must be {demanded:.6g}, that")):
        check(of(*examples(0)), told=told, demanded=demanded)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: replace(s, counts=s.counts - 1000.0), "a count is"),
        (lambda s: replace(s, gram=s.gram + 500.0 * torch.eye(FEATURES)), "gram has trace"),
        (lambda s: replace(s, sums=-40.0 * s.sums), "sums of class . have norm"),
        (lambda s: replace(s, gram=-s.gram), "gram has eigenvalues"),
        (lambda s: replace(s, gram=s.gram + 900.0 * torch.diag(torch.tensor([1.0, -1, 0, 0, 0, 0]))), "gram has eigen"),
    ],
)
def test_sums_that_noise_does_not_explain_are_refused(spoil: Callable[[Statistics], Statistics], message: str) -> None:
    with pytest.raises(UploadError, match=message):
        check(spoil(released(of(*examples(0, 900)), 1.0, 1e-5)))


@pytest.mark.parametrize(
    ("sizes", "share"),
    [((1.0, 1.0, 1.0, 100.0), 0.3), ((5.0, 50.0, 60.0, 2.0, 9.0), 0.25), ((1.0, 1.0, 98.0), 0.5)],
)
def test_no_capped_client_exceeds_the_share_and_the_others_keep_theirs(sizes: tuple[float, ...], share: float) -> None:
    named = {f"c{k}": size for k, size in enumerate(sizes)}
    factors = capped(named, share)
    left = {name: size * factors.get(name, 1.0) for name, size in named.items()}
    assert max(left.values()) == pytest.approx(share * sum(left.values()))
    assert factors
    assert all(factor < 1.0 for factor in factors.values())


def test_honest_sizes_are_left_as_they_are() -> None:
    assert capped({"a": 10.0, "b": 12.0, "c": 11.0}, 0.5) == {}


def test_a_share_below_an_equal_one_makes_all_clients_equal() -> None:
    factors = capped({"a": 10.0, "b": 20.0, "c": 40.0}, 0.2)
    assert [10.0 * factors.get("a", 1.0), 20.0 * factors["b"], 40.0 * factors["c"]] == [10.0, 10.0, 10.0]
