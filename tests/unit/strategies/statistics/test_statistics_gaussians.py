"""Full Gaussians of classes: pooled over clients as if their examples were one client's, and drawn from."""

import numpy as np
import pytest
import torch

from strategies.statistics.gaussians import Gaussians


def rows_of(seed: int, count: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=rng)
    rows = torch.randn(count, 4, generator=rng) @ torch.randn(4, 4, generator=rng) + shift + labels[:, None]
    return rows, labels


def test_pooled_variance_of_two_clients_is_that_of_their_examples_and_not_the_published_code_s() -> None:
    clients = ([0.0, 2.0], [4.0, 6.0])

    found = Gaussians.pooled([Gaussians.of(torch.tensor(own)[:, None], torch.tensor([0, 0]), 1) for own in clients])

    assert found.counts.tolist() == [4]
    assert found.means.tolist() == [[3.0]]
    assert float(found.covariances) == pytest.approx(20 / 3)
    # The code leaves mu mu^T in, of covariances with n_k in the denominator.
    released = sum((2 - 1) * np.var(own) + 2 * np.mean(own) ** 2 for own in clients) / (4 - 1)
    assert released == pytest.approx(18)


def test_pooled_gaussians_are_numpys_of_all_examples() -> None:
    clients = [rows_of(seed, count, 100.0 * seed) for seed, count in ((1, 9), (2, 1), (3, 14))]
    found = Gaussians.pooled([Gaussians.of(rows, labels, 4) for rows, labels in clients])

    rows, labels = (torch.cat(parts).numpy() for parts in zip(*clients, strict=True))
    assert found.counts.tolist() == np.bincount(labels, minlength=4).tolist()
    for c in range(3):
        own = rows[labels == c].astype(float)
        np.testing.assert_allclose(found.means[c], own.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.covariances[c], np.cov(own.T), rtol=1e-9)
    assert float(found.means[3].abs().sum() + found.covariances[3].abs().sum()) == 0.0  # no client has class 3


def test_pooling_what_travelled_in_float32_loses_no_digits_far_from_the_origin() -> None:
    rows, labels = rows_of(4, 40, 1000.0)
    halves = [Gaussians.of(rows[part], labels[part], 3) for part in (slice(0, 20), slice(20, 40))]
    sent = [Gaussians(half.counts, half.means.float(), half.covariances.float()) for half in halves]

    exact, found = Gaussians.of(rows, labels, 3).covariances, Gaussians.pooled(sent).covariances

    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e4])
def test_what_examples_have_passes_the_check_in_float32_for_any_scale_and_rank(scale: float) -> None:
    for count in (1, 2, 3, 30):
        rows, labels = rows_of(5, count, 10.0)
        rows[:, 3] = rows[0, 3]  # a feature that is constant
        rows[:, 2] *= 1e-9
        made = Gaussians.of(rows * scale, labels, 4)
        Gaussians(made.counts, made.means.float(), made.covariances.float()).check(count)
