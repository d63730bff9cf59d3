"""Labels as often as clients hold them, and what each client counts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator as rng
from strategies.distillation.label_draws import draw_labels, shares_of
from strategies.method import Job, Normalization, Silent, Upload


def job(*counts: Sequence[int] | None, classes: int = 4) -> Job:
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", "net", label_counts=None if own is None else tuple(own)), dict)
        for k, own in enumerate(counts)
    )
    return Job(uploads, {}, "net", classes, (1, 8, 8), Normalization((0.5,), (0.5,)), None)


class Notes(Silent):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def record(self, row: Any) -> None:
        self.rows.append(row)


def test_fixed_labels_are_the_floors_of_the_cumulated_shares() -> None:
    # p = (1/2, 0, 1/6, 1/3); cumulated times 10: 5, 5, 6.67, 10; floors 5, 5, 6, 10.
    labels = draw_labels([3, 0, 1, 2], 10, "fixed", rng(0))
    assert labels.bincount(minlength=4).tolist() == [5, 0, 1, 4]


def test_fixed_labels_are_shuffled_by_the_generator_alone() -> None:
    first, second, other = (draw_labels([1, 1, 1], 60, "fixed", rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not torch.equal(first, first.sort().values)
    assert torch.equal(first.sort().values, other.sort().values)


def test_independent_labels_follow_the_shares_and_not_their_floors() -> None:
    labels = draw_labels([3, 0, 1, 2, 0], 60_000, "independent", rng(0))
    counts = labels.bincount(minlength=5)
    assert counts.tolist() != [30_000, 0, 10_000, 20_000, 0]
    torch.testing.assert_close(counts / 60_000, torch.tensor([3.0, 0, 1, 2, 0]) / 6, rtol=0, atol=0.01)
    assert counts[[1, 4]].tolist() == [0, 0]


def test_missing_counts_weigh_all_equally_and_are_noted_once() -> None:
    notes = Notes()
    held, alpha = shares_of(job((6, 0, 1, 0), None, None), notes, labels="counts", weights="per-class")
    assert held == [1] * 4
    torch.testing.assert_close(alpha, torch.full((3, 4), 1 / 3))
    assert notes.rows == [{"note": "no label counts from c1, c2: all classes and clients weigh the same"}]


@pytest.mark.parametrize("told", [(None, None), ((6, 0, 1, 0), None), ((6, 0, 1, 0), (0, 0, 0, 0))])
def test_estimates_count_where_a_client_does_not_tell(told: Any) -> None:
    notes, found = Notes(), torch.tensor([[6.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.25, 0.0]])
    held, alpha = shares_of(job(*told), notes, labels="counts", weights="per-class", found=found)
    assert held == [6000, 500, 1250, 0]
    torch.testing.assert_close(alpha[:, :3], torch.tensor([[1.0, 0.0, 0.8], [0.0, 1.0, 0.2]]))
    assert notes.rows == []
