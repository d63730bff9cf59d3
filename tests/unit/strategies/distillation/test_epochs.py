import math

import pytest
import torch
from torch import nn

from strategies.distillation.epochs import learning_rate


def test_learning_rate_equals_torch_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    for epoch in range(7):
        assert math.isclose(optimizer.param_groups[0]["lr"], learning_rate("cosine", 0.3, epoch, 7), rel_tol=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("epochs", [1, 8])
def test_learning_rate_on_one_cycle_equals_torch_s_but_for_its_last_steps(epochs: int) -> None:
    steps = 4000
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=steps, pct_start=0.1, anneal_strategy="cos"
    )
    ours, theirs = [], []
    for step in range(steps):
        ours.append(learning_rate("one-cycle", 0.3, epochs * step / steps, epochs))
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # Torch counts steps from the first to the last, here they are counted to the end of the last.
    assert ours == pytest.approx(theirs, abs=0.3 * 5 / (0.1 * steps))
    assert ours[0] == pytest.approx(0.3 / 25)
    assert max(ours) == ours[steps // 10] == pytest.approx(0.3)
    assert 0 < ours[-1] < 1e-4 * 0.3
    assert ours[: steps // 10] == sorted(ours[: steps // 10])
    assert ours[steps // 10 :] == sorted(ours[steps // 10 :], reverse=True)
