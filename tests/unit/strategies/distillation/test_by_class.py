"""What clients count for a class."""

from __future__ import annotations

import torch

from strategies.distillation.by_class import class_weights


def test_weights_of_a_class_are_shares_of_its_examples_and_equal_where_there_are_none() -> None:
    found = class_weights([(3, 0, 0, 5), (1, 0, 2, 5)])
    assert found.tolist() == [[0.75, 0.5, 0.0, 0.5], [0.25, 0.5, 1.0, 0.5]]
    assert found.dtype == torch.float32
