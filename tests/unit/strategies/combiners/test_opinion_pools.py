"""What the pools promise beside their formulas, which stand in ``tests/reference``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies.combiners.combiners import COMBINERS
from strategies.combiners.opinion_pools import (
    RULES,
    OpinionPool,
)

POOLS = {name: COMBINERS[name] for name in ("linear-pool", "log-pool")}
# No client holds class 4.
COUNTS = torch.tensor([[30.0, 0, 5, 0, 0], [1, 20, 5, 0, 0], [0.5, 3, 0, 40, 0]])
WEIGHTS, TEMPERATURES = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 1.5, 0.8])


def logits(members: int = 3, scale: float = 2.0, seed: int = 0, classes: int = 5) -> Tensor:
    return scale * torch.randn(members, 11, classes, generator=torch.Generator().manual_seed(seed))


def pool_of(name: str, members: list[int], *, calibrated: bool, weights: Tensor = WEIGHTS) -> OpinionPool:
    """Return the pool of some members, calibrated on what these answer to the same noise."""
    pool = OpinionPool(name.removesuffix("-pool"), COUNTS[members], weights[members], TEMPERATURES[members])
    if calibrated:
        pool.calibrate(logits(seed=7)[members])
    return pool


@pytest.fixture(params=[False, True], ids=["plain", "calibrated"])
def calibrated(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=list(POOLS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_order_of_members_does_not_matter(name: str, calibrated: bool) -> None:
    order, z = [2, 0, 1], logits()
    pool, turned = (pool_of(name, members, calibrated=calibrated) for members in ([0, 1, 2], order))
    torch.testing.assert_close(turned(z[order]), pool(z))
    assert not torch.allclose(turned(z), pool(z), atol=0.1)


def test_a_single_client_with_uniform_counts_keeps_its_prediction(name: str) -> None:
    z = logits(1)
    found = POOLS[name](torch.full((1, 5), 7.0))(z).softmax(1)
    torch.testing.assert_close(found, z[0].softmax(1), rtol=0, atol=5e-4)  # 5 times the floor of the log pool


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_a_class_without_examples_never_wins_and_all_is_finite(name: str, calibrated: bool, scale: float) -> None:
    z = logits(scale=scale)
    z[:, :6, 4] += 10 * scale  # all agree that it is the one
    z.requires_grad_()
    found = pool_of(name, [0, 1, 2], calibrated=calibrated)(z)
    assert bool(found.isfinite().all())
    assert 4 not in found.argmax(1).tolist()
    assert bool((found[:, 4] < found[:, :4].min(1).values).all())
    torch.nn.functional.cross_entropy(found, torch.zeros(11, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())


def test_weight_of_zero_leaves_a_member_out(name: str, calibrated: bool) -> None:
    z, weights = logits(), torch.tensor([1.0, 0.0, 0.5])
    silenced, absent = (pool_of(name, m, calibrated=calibrated, weights=weights) for m in ([0, 1, 2], [0, 2]))
    torch.testing.assert_close(silenced(z), absent(z[[0, 2]]))


def test_calibrated_scales_make_members_equally_loud_whatever_their_logits_are() -> None:
    answers = logits(seed=3)
    loud = answers * torch.tensor([1.0, 100.0, 0.2]).view(3, 1, 1) + torch.tensor([5.0, 0.0, -3.0]).view(3, 1, 1)
    quiet, other = OpinionPool("log", COUNTS), OpinionPool("log", COUNTS)
    quiet.calibrate(answers)
    other.calibrate(loud)
    torch.testing.assert_close(other.scales * torch.tensor([1.0, 100.0, 0.2]), quiet.scales, rtol=1e-4, atol=0)
    torch.testing.assert_close(other.bias, quiet.bias, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(quiet.scales, 1 / (answers - answers.mean(2, keepdim=True)).square().mean((1, 2)).sqrt())


def test_member_of_weight_zero_may_have_logits_that_are_not_finite() -> None:
    answers = logits(seed=3)
    weights = torch.tensor([1.0, 0.0, 1.0])
    for rule in RULES:
        clean, spoilt = OpinionPool(rule, COUNTS, weights), OpinionPool(rule, COUNTS, weights)
        clean.calibrate(answers)
        broken = answers.clone()
        broken[1] = (
            torch.tensor([torch.inf, torch.nan]).repeat(broken[1].numel())[: broken[1].numel()].view_as(broken[1])
        )
        spoilt.calibrate(broken)
        assert torch.equal(spoilt.bias, clean.bias)
        assert torch.equal(spoilt(broken), clean(answers))
