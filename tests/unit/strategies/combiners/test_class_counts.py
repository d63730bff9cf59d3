"""Class shares read off a model; the formulas once more in numpy stand in ``tests/reference``."""

from __future__ import annotations

import pytest
import torch

from strategies.combiners.class_counts import capped, geometric_mean, response_shares


def test_response_shares_of_a_client_that_never_answers_with_a_class_are_small_there() -> None:
    logits = torch.randn(2, 500, 3, generator=torch.Generator().manual_seed(0))
    logits[0, :, 2] -= 6
    shares = response_shares(logits)
    assert shares.dtype == torch.float64
    torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=torch.float64))
    assert float(shares[0, 2]) < 0.02
    assert float(shares[1].min()) > 0.3


def test_response_shares_weigh_sure_answers_more_than_their_mean_does() -> None:
    # Always a tenth of class 1, or wholly class 1 in a tenth of all images: equal means, other squares.
    even = torch.tensor([0.9, 0.1]).log().expand(10, 2)
    sure = torch.tensor([[0.0, 40.0]] + [[40.0, 0.0]] * 9)
    shares = response_shares(torch.stack([even, sure]))
    assert float(shares[0, 1]) == pytest.approx(0.1)
    assert float(shares[1, 1]) == pytest.approx(0.1**0.5 / (0.1**0.5 + 0.9**0.5))


def test_geometric_mean_of_equal_tables_is_the_table_and_needs_both_to_know_a_class() -> None:
    one = torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(geometric_mean(one, one), one)
    other = torch.tensor([[0.5, 0.0, 0.5], [0.25, 0.25, 0.5]], dtype=torch.float64)
    mean = geometric_mean(one, other)
    assert mean[0].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(mean, geometric_mean(other, one))
    torch.testing.assert_close(mean.sum(1), torch.ones(2, dtype=torch.float64))


def test_capped_sizes_are_at_most_the_median() -> None:
    assert capped(torch.tensor([10.0, 1e9, 20.0])).tolist() == [10.0, 20.0, 20.0]
    assert capped(torch.tensor([5.0])).tolist() == [5.0]
    # Of two there is no middle: the smaller one is no exaggeration.
    assert capped(torch.tensor([10.0, 1e9])).tolist() == [10.0, 10.0]
    assert capped(torch.tensor([])).tolist() == []
