"""The checks of an upload of sums, with and without noise, and the cap on a client's claimed share."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, examples, of
from torch import Tensor

from strategies.core.errors import UploadError
from strategies.core.fingerprint import encode_fingerprint
from strategies.statistics.privacy import noise_std, release_sums
from strategies.statistics.sums import Statistics
from strategies.statistics.uploaded import FeatureSums, cap_shares

FINGERPRINT = encode_fingerprint({"backbone": "tiny"})
SIGMA = noise_std(1.0, 1e-5)


def sent(statistics: Statistics, noise: float) -> dict[str, Tensor]:
    model = FeatureSums(CLASSES, FEATURES, FINGERPRINT)
    model.fill(statistics, noise=noise)
    return dict(model.state_dict())


def check(statistics: Statistics, *, told: float = SIGMA, demanded: float = SIGMA) -> None:
    FeatureSums(CLASSES, FEATURES, FINGERPRINT, noise=demanded).check_upload(sent(statistics, told))


@pytest.mark.parametrize("count", [1, 90, 5000])
def test_honest_noisy_sums_pass_every_bound(count: int) -> None:
    exact = of(*examples(0, count))
    for _ in range(50):
        check(release_sums(exact, 1.0, 1e-5))


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
        check(spoil(release_sums(of(*examples(0, 900)), 1.0, 1e-5)))


@pytest.mark.parametrize("noise", [0.0, SIGMA])
@pytest.mark.parametrize("told", [None, 90])
def test_counts_whose_sum_is_infinite_are_refused(noise: float, told: int | None) -> None:
    found = release_sums(of(*examples(0, 900)), 1.0, 1e-5)
    state = sent(replace(found, counts=torch.full_like(found.counts, 1.7e308)), noise)
    with pytest.raises(UploadError, match=re.escape("counts sum to inf: must be below 2**63")):
        FeatureSums(CLASSES, FEATURES, FINGERPRINT, noise=noise).check_upload(state, told)


def upload(rows: Tensor, labels: Tensor, *second: str) -> tuple[FeatureSums, dict[str, Tensor]]:
    """Return the server's empty sums, and a client's upload."""
    empty, full = (
        FeatureSums(CLASSES, rows.shape[1], FINGERPRINT, non_negative=bool((rows >= 0).all()), second=second)
        for _ in range(2)
    )
    parts = full.empty()
    for part in parts:
        part.include(rows, labels)
    full.fill(*parts)
    return empty, {key: value.clone() for key, value in full.state_dict().items()}


def upper(matrix: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns].float()


@pytest.mark.parametrize("second", [("gram",), ("squares",), ("gram", "squares")])
@pytest.mark.parametrize("count", [1, 4, 90, 3000])
def test_honest_sums_pass_every_bound(second: tuple[str, ...], count: int) -> None:
    rows, labels = examples(0, count)
    for found in (rows, rows.abs()):
        empty, state = upload(found, labels, *second)
        empty.check_upload(state, count)


def diagonal(*values: float) -> Tensor:
    """Return a Gram matrix whose diagonal is 90 / 6 in each place, but for the given changes."""
    return 15.0 * torch.eye(FEATURES) + torch.diag(torch.tensor([*values, *[0.0] * (FEATURES - len(values))]))


def crossed(value: float, *, first: float = 0.0) -> Tensor:
    matrix = diagonal(first, first, -first, -first)
    matrix[0, 1] = matrix[1, 0] = value
    return matrix


# Array -> its change, which keeps the other bounds, and the message. There are 90 examples.
BROKEN: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("counts", lambda value: value - 200.0, "counts are .*: must be whole numbers from 0"),
    ("sums", lambda value: value.index_fill(0, torch.tensor([1]), 90.0), "sums of class 1 have norm"),
    ("gram", lambda value: value * 1.01, "gram has trace 90.9 for 90 examples"),
    ("gram", lambda _: upper(diagonal(-16.0, 16.0)), "gram has -1 on its diagonal"),
    ("gram", lambda _: upper(crossed(15.1)), "gram has 15.1 for features 0 and 1: must be at most half"),
    ("gram", lambda _: upper(crossed(-15.1)), "gram has -15.1 for features 0 and 1"),
    ("gram", lambda _: upper(diagonal()), "gram has eigenvalue"),
    ("squares", lambda value: value * 1.01, "squares of class . sum to"),
    ("squares", lambda value: value.roll(1, 1), "squares of class . are below the squared sums"),
    (
        "squares",
        lambda value: value + torch.tensor([0.1, -0.1, 0, 0, 0, 0]),
        "squares differ from the diagonal of gram",
    ),
]


@pytest.mark.parametrize(("array", "change", "message"), BROKEN)
def test_each_bound_refuses_what_breaks_it(array: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    rows, labels = examples(0)
    empty, state = upload(rows, labels, "gram", "squares")
    state[array] = change(state[array])
    with pytest.raises(UploadError, match=message):
        empty.check_upload(state)


@pytest.mark.parametrize("second", ["gram", "squares"])
def test_features_without_negative_values_have_no_negative_sums(second: str) -> None:
    rows, labels = examples(0)
    empty, state = upload(rows.abs(), labels, second)
    state["sums"].neg_()
    with pytest.raises(
        UploadError, match="have negative entries: must be at least 0, as every feature of this backbone is"
    ):
        empty.check_upload(state)


@pytest.mark.parametrize(
    ("sizes", "share"), [((1.0, 1.0, 1.0, 100.0), 0.3), ((5.0, 50.0, 60.0, 2.0, 9.0), 0.25), ((1.0, 1.0, 98.0), 0.5)]
)
def test_no_capped_client_exceeds_the_share_and_the_others_keep_theirs(sizes: tuple[float, ...], share: float) -> None:
    named = {f"c{k}": size for k, size in enumerate(sizes)}
    factors = cap_shares(named, share)
    left = {name: size * factors.get(name, 1.0) for name, size in named.items()}
    assert max(left.values()) == pytest.approx(share * sum(left.values()))
    assert factors
    assert all(factor < 1.0 for factor in factors.values())
