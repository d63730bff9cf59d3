"""Members asked once: the same scores, fewer forward passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strategies.combiners.combiners import Mean, Weighted
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.remembered import Remembered


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return super().forward(x)


@pytest.fixture
def ensemble(monkeypatch: pytest.MonkeyPatch) -> Ensemble:
    monkeypatch.setattr(Counted, "calls", 0)
    return Ensemble([Counted(6, 3), Counted(6, 3)], Mean())


def test_members_are_asked_once_for_each_batch_and_the_new_combiner_is_used(ensemble: Ensemble) -> None:
    scored, first, second = Remembered(ensemble), torch.randn(4, 6), torch.randn(4, 6)
    for x in (first, second, first.clone(), second):
        scored(x)
    assert Counted.calls == 4

    ensemble.combiner = Weighted([1.0, 0.0])
    torch.testing.assert_close(scored(first), ensemble.members[0](first))
    torch.testing.assert_close(scored(second), ensemble(second))
