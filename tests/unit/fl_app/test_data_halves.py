"""The halves of the held-out examples."""

from __future__ import annotations

import torch

from fl_app.data import half_of

LABELS = torch.tensor([0, 1, 1, 0, 2, 1, 0, 0, 1, 2, 2] * 3)


def test_halves_share_no_example_and_leave_none_out() -> None:
    selection, report = half_of(LABELS, "selection"), half_of(LABELS, "report")

    assert torch.cat([selection, report]).sort().values.tolist() == half_of(LABELS, "all").tolist()


def test_halves_have_the_same_classes() -> None:
    counts = [torch.bincount(LABELS[half_of(LABELS, half)]) for half in ("selection", "report")]

    assert [count.tolist() for count in counts] == [[6, 6, 4], [6, 6, 5]]


def test_halves_depend_on_no_seed_of_a_run_and_no_global_draw() -> None:
    first = half_of(LABELS, "report")
    torch.rand(3)

    assert half_of(LABELS, "report").tolist() == first.tolist()
    assert first.tolist() != sorted(first.tolist())[::-1]
