"""Ridge regression from sums: scikit-learn's on all examples, for every division, with its scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from sklearn.datasets import load_diabetes, load_linnerud
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score, root_mean_squared_error
from torch import Tensor, nn

from strategies import RegressionSums, ridge_regression
from strategies.statistics.heads import LAMBDAS

Pairs = tuple[Tensor, Tensor]
DATA = [load_diabetes, load_linnerud]


def examples(load: Callable[..., Any]) -> Pairs:
    rows, targets = load(return_X_y=True)
    return torch.from_numpy(rows), torch.from_numpy(targets)


def divided(pairs: Pairs, parts: int) -> list[Pairs]:
    """Return the examples in order of their target, so that the parts differ as much as they can."""
    rows, targets = pairs
    order = targets.reshape(len(targets), -1)[:, 0].argsort()
    return list(zip(rows[order].tensor_split(parts), targets[order].tensor_split(parts), strict=True))


def of_scikit_learn(pairs: Pairs, penalty: float) -> Any:
    rows, targets = (each.numpy() for each in pairs)
    strength = penalty * ((rows - rows.mean(0)) ** 2).sum() / rows.shape[1]
    return Ridge(alpha=strength).fit(rows, targets)


def predicted(model: nn.Linear, rows: Tensor) -> np.ndarray[Any, Any]:
    return model(rows).squeeze(1).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("load", DATA)
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("penalty", [1e-3, 0.1, 3.0])
def test_the_regression_is_that_of_all_examples_in_one_place(load: Any, parts: int, penalty: float) -> None:
    pairs = examples(load)
    sent = [ArrayRecord(vars(RegressionSums.of(*part))) for part in divided(pairs, parts)]  # type: ignore[arg-type]
    found = ridge_regression([RegressionSums(**record.to_torch_state_dict()) for record in sent], penalty)
    wanted = of_scikit_learn(pairs, penalty).predict(pairs[0].numpy())
    np.testing.assert_allclose(predicted(found, pairs[0]), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("load", DATA)
def test_the_penalty_is_that_with_the_least_error_on_clients_that_were_left_out(load: Any) -> None:
    pairs = examples(load)
    parts = divided(pairs, 4)
    spread = pairs[1].reshape(len(pairs[1]), -1).var(0, correction=0).numpy() * len(pairs[1])

    def error(penalty: float) -> float:
        total = 0.0
        for left in range(4):
            rest: Any = [torch.cat(each) for each in zip(*(parts[k] for k in range(4) if k != left), strict=True)]
            missed = of_scikit_learn(rest, penalty).predict(parts[left][0].numpy()) - parts[left][1].numpy()
            total += float(((missed**2).reshape(len(missed), -1).sum(0) / spread).sum())
        return total

    best = of_scikit_learn(pairs, min(LAMBDAS, key=error)).predict(pairs[0].numpy())
    found = ridge_regression(RegressionSums.of(*part) for part in parts)
    np.testing.assert_allclose(predicted(found, pairs[0]), best, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("load", DATA)
def test_scores_from_sums_are_those_of_the_examples(load: Any) -> None:
    rows, targets = examples(load)
    model = ridge_regression([RegressionSums.of(rows[::2], targets[::2])], 0.1)
    held = RegressionSums.of(rows[1::2], targets[1::2])
    said, answers, truth = held.scores(model), predicted(model, rows[1::2]), targets[1::2].numpy()
    assert held.examples == len(truth)
    np.testing.assert_allclose(said["r2"], np.atleast_1d(r2_score(truth, answers, multioutput="raw_values")))
    wanted = np.atleast_1d(root_mean_squared_error(truth, answers, multioutput="raw_values"))
    np.testing.assert_allclose(said["rmse"], wanted)


@pytest.mark.parametrize("mean", [1e4, 1e6])
@pytest.mark.parametrize("penalty", [0.0, 0.001])
def test_features_far_from_zero_lose_no_digits(mean: float, penalty: float) -> None:
    draws = np.random.default_rng(0)
    near = draws.normal(size=(400, 6)) @ draws.normal(size=(6, 6))
    targets = near @ draws.normal(size=(6, 2)) + 0.1 * draws.normal(size=(400, 2)) - 3 * mean
    rows = near + mean
    parts = [RegressionSums.of(torch.from_numpy(rows[k::4]), torch.from_numpy(targets[k::4])) for k in range(4)]
    found = ridge_regression(parts, penalty)
    if penalty:
        around = rows - rows.mean(0)
        gram = around.T @ around
        strength = penalty * np.trace(gram) / 6
        weight = np.linalg.solve(gram + strength * np.eye(6), around.T @ (targets - targets.mean(0))).T
        np.testing.assert_allclose(found.weight.numpy(), weight, rtol=1e-7, atol=1e-9)
    wrong = found(torch.from_numpy(rows)).numpy() - targets
    root = np.sqrt((wrong[::4] ** 2).mean(0))
    np.testing.assert_allclose(parts[0].scores(found)["rmse"], root, rtol=1e-5)
    together = functools.reduce(RegressionSums.__add__, parts)
    np.testing.assert_allclose(
        (together - parts[0] - parts[1]).scatter, (parts[2] + parts[3]).scatter, rtol=1e-6, atol=1e-6
    )


def test_features_without_scatter_lead_to_the_mean_of_the_targets() -> None:
    sums = RegressionSums.of(torch.ones(4, 2), torch.tensor([1.0, 2.0, 3.0, 6.0]))
    found = ridge_regression([sums], 0.1)
    assert found(torch.ones(1, 2).double()).tolist() == [[3.0]]
    assert np.isnan(RegressionSums.of(torch.ones(2, 2), torch.ones(2)).scores(found)["r2"]).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -1e5 / 3])
def test_a_constant_target_has_no_share_of_variance_and_no_weight_in_the_choice(value: float) -> None:
    rows, targets = examples(load_diabetes)
    constant = torch.full_like(targets, value)
    both = [RegressionSums.of(rows[k::3], torch.stack([targets, constant], dim=1)[k::3]) for k in range(3)]
    alone = ridge_regression(RegressionSums.of(rows[k::3], targets[k::3]) for k in range(3))
    found = ridge_regression(both)
    np.testing.assert_allclose(found.weight[:1].numpy(), alone.weight.numpy(), rtol=1e-9)
    for sums in (functools.reduce(RegressionSums.__add__, both), both[0]):
        shares = sums.scores(found)["r2"]
        assert 0 < shares[0] < 1
        assert np.isnan(shares[1])


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_a_client_without_examples_changes_nothing(penalty: float) -> None:
    parts = [RegressionSums.of(ROWS[k::2], NUMBERS[k::2]) for k in range(2)]
    found, alone = (
        ridge_regression(each, penalty) for each in ([*parts, RegressionSums.of(ROWS[:0], NUMBERS[:0])], parts)
    )
    assert torch.equal(found.weight, alone.weight)
    assert torch.equal(found.bias, alone.bias)


ROWS, NUMBERS = torch.rand(6, 2), torch.rand(6)


def with_count(count: float) -> RegressionSums:
    return replace(RegressionSums.of(ROWS, NUMBERS), count=torch.tensor([count]))


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda: RegressionSums.of(ROWS, NUMBERS[:5]), r"\[6, 2\] and targets \[5\]: must be"),
        (lambda: RegressionSums.of(ROWS, NUMBERS / 0), "NaN or Inf"),
        (
            lambda: RegressionSums(torch.ones(3), torch.ones(3, 3), torch.ones(1, 2), torch.ones(1), torch.ones(1)),
            r"\[3, 3\], \[1, 2\], \[1\], \[1\]\]: must be",
        ),
        *[(functools.partial(with_count, count), "count is .*: must be a whole number") for count in (-1.0, 2.5)],
        (lambda: ridge_regression([RegressionSums.of(ROWS, NUMBERS)]), "penalty is 0 for the sums of 1 clients"),
        (lambda: ridge_regression([], 1.0), "0 clients"),
        (lambda: ridge_regression([RegressionSums.of(ROWS[:0], NUMBERS[:0])], 1.0), "0 clients with examples"),
        (lambda: ridge_regression([RegressionSums.of(ROWS, NUMBERS)], float("nan")), "penalty is nan"),
        (lambda: ridge_regression([RegressionSums.of(ROWS, NUMBERS)], -1.0), "must be above 0"),
        (
            lambda: ridge_regression([RegressionSums.of(ROWS, NUMBERS), RegressionSums.of(ROWS, ROWS)], 1.0),
            r"\[1, 2\], \[2, 2\]: must be equal",
        ),
    ],
)
def test_what_cannot_be_solved_is_refused_in_one_line(spoil: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        spoil()
