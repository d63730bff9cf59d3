"""Which members agree with the others on noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.combiners.agreement import agreeing, agreements, correlations
from strategies.core.seeds import generator as rng

M, N, C = 7, 400, 5


def members(noise: float, count: int = M) -> Tensor:
    """Return logits [count, N, C] of members that see the same, each with noise of its own."""
    common = torch.randn(1, N, C, generator=rng(0))
    return common + noise * torch.randn(count, N, C, generator=rng(1))


def test_correlations_are_weighed_by_both_models_shares_of_a_class() -> None:
    logits = (members(1.0, 3) * torch.tensor([1.0, 2.0, 0.5])[:, None, None]).double()
    z = logits.numpy()
    powers = np.exp(z)
    shares = np.sqrt(((powers / powers.sum(2, keepdims=True)) ** 2).mean(1))
    shares /= shares.sum(1, keepdims=True)

    found = correlations(logits)

    for j in range(3):
        for k in range(3):
            weight = np.sqrt(shares[j] * shares[k])
            by_class = [np.corrcoef(z[j, :, c], z[k, :, c])[0, 1] for c in range(C)]
            assert float(found[j, k]) == pytest.approx((weight * by_class).sum() / weight.sum(), abs=1e-9)


def test_agreements_are_means_over_the_others() -> None:
    table = torch.tensor([[1.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 1.0]])

    assert agreements(table).tolist() == pytest.approx([0.3, 0.4, 0.2])


@pytest.mark.parametrize("which", [0, 3, 6])
@pytest.mark.parametrize("bad", ["flipped", "random", "constant", "nan", "inf"])
def test_a_member_when_it_sees_something_else_is_left_out(which: int, bad: str) -> None:
    logits = members(0.7)
    logits[which] = {
        "flipped": logits[which].flip(1),
        "random": torch.randn(N, C, generator=rng(2)),
        "constant": torch.ones(N, C),
        "nan": torch.full((N, C), torch.nan),
        "inf": torch.full((N, C), torch.inf),
    }[bad]

    assert agreeing(logits, 0.3).tolist() == [k != which for k in range(M)]


def test_more_than_half_are_kept_whatever_they_answer() -> None:
    for count in range(1, 8):
        logits = torch.randn(count, N, C, generator=rng(count))
        logits[: count // 2 + 1] = members(0.1, count)[: count // 2 + 1]  # the others agree with no client

        kept = agreeing(logits, 1.0)

        assert 2 * int(kept.sum()) > count or count <= 2
        assert kept[: count // 2 + 1].all()
        assert int(kept.sum()) == (count // 2 + 1 if count > 2 else count)
