"""The rules of merging in weight space against numpy, and the cases in which they are often wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.core.seeds import generator
from strategies.weights.rules import average, drop_and_rescale, fisher, regmean, ties, trim, tsv

Array = np.ndarray[Any, Any]
WEIGHTS = [0.5, 0.2, 0.3]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def updates() -> list[Tensor]:
    return list(draw(3, 12, 9))


def ties_by_numpy(taus: Array, density: float) -> Array:
    kept = np.zeros_like(taus)
    for k, tau in enumerate(taus):
        order = np.argsort(-np.abs(tau).ravel(), kind="stable")[: max(1, int(density * tau.size + 0.5))]
        kept[k].ravel()[order] = tau.ravel()[order]
    sign = np.sign(kept.sum(0))
    agree = (np.sign(kept) == sign) & (sign != 0)
    total = np.where(agree, kept, 0.0).sum(0)
    found: Array = total / np.maximum(agree.sum(0), 1)
    return found


@pytest.mark.parametrize("density", [0.001, 0.2, 0.37, 1.0])
def test_ties_equals_numpy(density: float) -> None:
    taus = updates()
    expected = ties_by_numpy(torch.stack(taus).numpy(), density)
    np.testing.assert_allclose(ties(taus, density).numpy(), expected, atol=1e-15)
    np.testing.assert_array_equal(ties([-tau for tau in taus], density).numpy(), -ties(taus, density).numpy())


@pytest.mark.parametrize(
    ("values", "density", "expected"),
    [
        ([1.0, -4.0, 2.0, 3.0], 0.2, [0, -4, 0, 0]),  # one at least
        ([1.0, -1.0, 1.0, 1.0], 0.5, [1, -1, 0, 0]),  # of equal ones the first
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.5, [0, 0, 3, 4, 5]),  # half an entry counts
        ([0.0, 0.0, 7.0], 0.7, [0, 0, 7]),
    ],
)
def test_trim_keeps_exactly_its_share(values: list[float], density: float, expected: list[float]) -> None:
    assert trim(torch.tensor(values), density).tolist() == expected


def test_ties_is_zero_where_the_signs_cancel() -> None:
    assert ties([torch.tensor([2.0, 1.0]), torch.tensor([-2.0, 3.0])], 1.0).tolist() == [0.0, 2.0]


def test_dare_keeps_the_mean_and_scales_what_is_left() -> None:
    update = torch.ones(200, 500)
    dropped = drop_and_rescale(update, 0.9, generator(7, "dare", "a", "layer"))
    assert dropped.unique().tolist() == [0.0, pytest.approx(10.0)]
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.03)  # its deviation is 3 / sqrt(1e5)
    again = drop_and_rescale(update, 0.9, generator(7, "dare", "a", "layer"))
    other = drop_and_rescale(update, 0.9, generator(7, "dare", "b", "layer"))
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, other)
    assert torch.equal(drop_and_rescale(update, 0.0, generator(7)), update)


def test_fisher_equals_numpy_and_is_the_average_without_information() -> None:
    taus, diagonals = updates(), list(draw(3, 12, 9, seed=1).square())
    scaled = np.stack([w * f.numpy() for w, f in zip(WEIGHTS, diagonals, strict=True)])
    expected = (scaled * torch.stack(taus).numpy()).sum(0) / scaled.sum(0)
    np.testing.assert_allclose(fisher(taus, WEIGHTS, diagonals).numpy(), expected, rtol=1e-4, atol=1e-5)
    mean = average(taus, WEIGHTS)
    zero = [torch.zeros(12, 9)] * 3
    torch.testing.assert_close(fisher(taus, WEIGHTS, zero), mean)
    tiny = [torch.full((12, 9), 1e-30)] * 3
    torch.testing.assert_close(fisher(taus, WEIGHTS, tiny), mean)
    first = [torch.ones(12, 9), *zero[:2]]
    torch.testing.assert_close(fisher(taus, WEIGHTS, first), taus[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("off_diagonal", [1.0, 0.9, 0.0])
def test_regmean_equals_a_least_squares_fit(off_diagonal: float) -> None:
    taus, inputs = updates(), [draw(9, 30 * (k + 1), seed=k + 10) for k in range(3)]
    grams = [x @ x.T for x in inputs]
    shrunk = [off_diagonal * g.numpy() + (1 - off_diagonal) * np.diag(np.diag(g.numpy())) for g in grams]
    roots = [np.linalg.cholesky(g) for g in shrunk]
    targets = np.concatenate([tau.numpy() @ root for tau, root in zip(taus, roots, strict=True)], axis=1)
    expected = np.linalg.lstsq(np.concatenate(roots, axis=1).T, targets.T, rcond=None)[0].T
    np.testing.assert_allclose(regmean(taus, WEIGHTS, grams, off_diagonal).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_regmean_averages_inputs_that_no_client_has() -> None:
    taus, mask = updates(), torch.ones(9, 1, dtype=torch.float64)
    mask[4:6] = 0.0
    inputs = [mask * draw(9, 50, seed=k) for k in range(3)]
    merged = regmean(taus, WEIGHTS, [x @ x.T for x in inputs], 0.9)
    mean = average(taus, WEIGHTS)
    torch.testing.assert_close(merged[:, 4:6], mean[:, 4:6])
    torch.testing.assert_close(regmean(taus, WEIGHTS, [torch.zeros(9, 9)] * 3, 0.9), mean)


def test_tsv_equals_numpy() -> None:
    taus = updates()
    parts = [np.linalg.svd(tau.numpy(), full_matrices=False) for tau in taus]
    kept = 9 // 3

    def whitened(vectors: Array) -> Array:
        values, basis = np.linalg.eigh(vectors.T @ vectors)
        found: Array = vectors @ (basis / np.sqrt(values)) @ basis.T
        return found

    left = whitened(np.concatenate([u[:, :kept] for u, _, _ in parts], axis=1))
    right = whitened(np.concatenate([vt[:kept].T for _, _, vt in parts], axis=1))
    expected = (left * np.concatenate([s[:kept] for _, s, _ in parts])) @ right.T
    np.testing.assert_allclose(tsv(taus).numpy(), expected, atol=1e-10)


def low_rank(rank: int, seed: int = 0) -> Tensor:
    return draw(12, rank, seed=seed) @ draw(rank, 9, seed=seed + 1)


def test_tsv_counts_equal_clients_once_and_ignores_those_without_change() -> None:
    tau = low_rank(3)
    for noise in (0.0, 1e-9):
        near = [tau + noise * draw(12, 9, seed=k) for k in range(3)]
        torch.testing.assert_close(tsv(near), tau, atol=1e-7, rtol=0)
    torch.testing.assert_close(tsv([tau] * 3), tau, atol=1e-9, rtol=0)
    zero = torch.zeros_like(tau)
    torch.testing.assert_close(tsv([tau, zero, 1e-9 * draw(12, 9, seed=8)]), tau, atol=1e-7, rtol=0)
    assert not tsv([zero, zero]).any()


def test_tsv_keeps_a_direction_of_each_of_more_clients_than_rows() -> None:
    taus = [draw(4, 9, seed=k) for k in range(7)]
    assert float(tsv(taus).norm()) > 1.0
