"""Moments of classes: one diagonal Gaussian for each, from sums alone."""

import numpy as np
import torch
from statistics_fakes import CLASSES, FEATURES, examples

from strategies.statistics.moments import Moments, moments_from_arrays, moments_to_arrays

ANY = torch.full((FEATURES,), 7.0, dtype=torch.float64)


def moments(rows: torch.Tensor, labels: torch.Tensor) -> Moments:
    found = Moments.zeros(CLASSES, FEATURES)
    for some, own in zip(rows.split(7), labels.split(7), strict=True):
        found.include(some, own)
    return found


def test_variances_are_numpys_within_each_class() -> None:
    rows, labels = examples(0)
    found = moments(rows, labels).variances(ANY)
    for c in range(CLASSES):
        np.testing.assert_allclose(found[c], rows[labels == c].numpy().var(0), rtol=1e-9)


def test_a_class_of_one_example_has_the_mean_variance_of_the_others() -> None:
    rows, labels = examples(1)
    kept = (labels != 2) | (torch.arange(90) == int((labels == 2).nonzero()[0]))
    own = moments(rows[kept], labels[kept])
    assert own.counts[2] == 1
    wanted = sum(float(own.counts[c]) * rows[labels == c].numpy().var(0) for c in (0, 1)) / float(own.counts[:2].sum())
    np.testing.assert_allclose(own.variances(ANY)[2], wanted, rtol=1e-9)
    np.testing.assert_allclose(own.means[2], rows[kept][labels[kept] == 2][0], rtol=1e-12)


def test_arrays_round_once_to_float32() -> None:
    made = moments(*examples(4))
    found = moments_from_arrays(moments_to_arrays(made))
    assert torch.equal(found.counts, made.counts)
    assert torch.equal(found.squares, made.squares.float().double())
