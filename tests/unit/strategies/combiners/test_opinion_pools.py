"""What the pools promise beside their formulas, which stand in ``tests/reference``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies.combiners.combiners import COMBINERS, build_combiner, name_of
from strategies.combiners.opinion_pools import (
    COUNTING,
    RULES,
    OpinionPool,
    balancing_bias,
    class_shares,
    log_priors,
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


def test_a_single_client_without_some_classes_loses_its_prior_and_those(name: str) -> None:
    counts, z = torch.tensor([[6.0, 3.0, 0.0]]), logits(1, classes=3)
    z[:, :, 2] -= 8  # as of a class that it never saw
    found = POOLS[name](counts)(z).softmax(1)
    # Its opinions of classes that it holds, each divided by the share that it has of it, are all that counts.
    corrected = z[0].softmax(1)[:, :2] / torch.tensor([6 / 9 + 2 / 130, 3 / 9 + 2 / 130])
    torch.testing.assert_close(found[:, :2], corrected / corrected.sum(1, keepdim=True), rtol=0, atol=5e-4)
    assert float(found[:, 2].max()) < 1e-3


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


def test_members_that_hold_nothing_at_all_leave_no_preference(name: str) -> None:
    z = logits(2).requires_grad_()
    found = POOLS[name](torch.zeros(2, 5))(z)
    torch.testing.assert_close(found.softmax(1), torch.full((11, 5), 0.2))
    found.sum().backward()
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())


def test_weight_of_zero_leaves_a_member_out(name: str, calibrated: bool) -> None:
    z, weights = logits(), torch.tensor([1.0, 0.0, 0.5])
    silenced, absent = (pool_of(name, m, calibrated=calibrated, weights=weights) for m in ([0, 1, 2], [0, 2]))
    torch.testing.assert_close(silenced(z), absent(z[[0, 2]]))


def test_only_the_proportions_of_weights_and_of_examples_matter(name: str) -> None:
    z, pool = logits(), POOLS[name](COUNTS, WEIGHTS, TEMPERATURES)
    torch.testing.assert_close(POOLS[name](COUNTS, 7 * WEIGHTS, TEMPERATURES)(z), pool(z))
    torch.testing.assert_close(POOLS[name](7 * COUNTS, WEIGHTS, TEMPERATURES)(z), pool(z))


def test_constants_that_a_member_adds_to_its_logits_do_not_matter(name: str, calibrated: bool) -> None:
    z, pool = logits(), pool_of(name, [0, 1, 2], calibrated=calibrated)
    torch.testing.assert_close(pool(z + torch.tensor([3.0, -50.0, 9.0]).view(3, 1, 1)), pool(z), rtol=1e-4, atol=1e-4)


def test_higher_temperatures_give_flatter_opinions(name: str) -> None:
    z = logits(1)
    cool, warm = (POOLS[name](torch.ones(1, 5), None, torch.tensor([t]))(z).softmax(1) for t in (1.0, 4.0))
    assert float(warm.max(1).values.mean()) < float(cool.max(1).values.mean()) - 0.1
    assert torch.equal(warm.argmax(1), cool.argmax(1))


def test_doubtful_member_falls_silent_where_its_mass_goes_to_classes_that_it_does_not_hold() -> None:
    # The first client knows classes 0 and 1 and answers evenly; the second knows class 2 and is sure of it.
    counts = torch.tensor([[50.0, 50.0, 0.0], [0.0, 0.0, 100.0]])
    z = torch.tensor([[[0.0, 0.0, 0.0]], [[0.0, 0.0, 4.0]]])
    for pool in POOLS.values():
        assert int(pool(counts)(z).argmax()) == 2
        assert float(pool(counts)(z).softmax(1)[0, 2]) > 0.7


def test_gradients_reach_the_logits_of_the_members_that_count(name: str) -> None:
    z = logits().requires_grad_()
    POOLS[name](COUNTS, torch.tensor([1.0, 0.0, 1.0]))(z)[:, :4].square().sum().backward()
    assert z.grad is not None
    assert [bool(part.abs().sum() > 0) for part in z.grad] == [True, False, True]


def test_pool_goes_through_its_tensors_and_back_with_the_same_bits(name: str) -> None:
    pool = POOLS[name](COUNTS, WEIGHTS, TEMPERATURES, torch.tensor([0.1]))
    pool.calibrate(logits(seed=1))
    state = pool.state_dict()
    assert state.keys() == {"counts", "weights", "temperatures", "smoothing", "scales", "bias"}
    again = build_combiner(name, state)
    assert name_of(again) == name_of(pool) == name
    assert torch.equal(again(logits()), pool(logits()))
    state["counts"].zero_()
    assert not torch.equal(again.get_buffer("counts"), state["counts"])  # a copy


def test_defaults_are_ones_and_the_usual_smoothing(name: str) -> None:
    plain = POOLS[name](COUNTS)
    none = {"scales": torch.zeros(3), "bias": torch.zeros(5)}
    told = POOLS[name](COUNTS, torch.ones(3), torch.ones(3), torch.tensor([2 / 130]), **none)
    assert torch.equal(plain(logits()), told(logits()))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("counts", -COUNTS, "counts of .*: must be finite numbers from 0, for each of 3 members"),
        ("counts", COUNTS / 0, "counts of .*: must be finite"),
        ("counts", COUNTS[0], "'counts' of .* must be 2-d"),
        ("weights", torch.ones(2), "weights of .* for each of 3 members"),
        ("weights", torch.tensor([1.0, -1.0, 1.0]), "weights of .*: must be finite numbers from 0"),
        ("weights", torch.tensor([1.0, torch.inf, 1.0]), "weights of"),
        ("weights", torch.ones(3, 1), "'weights' of .* must be 1-d"),
        ("temperatures", torch.tensor([1.0, 0.0, 1.0]), "temperatures of .*: must be 3 positive numbers"),
        ("temperatures", torch.ones(4), "temperatures of .*: must be 3 positive numbers"),
        ("temperatures", torch.tensor([1.0, torch.nan, 1.0]), "temperatures of"),
        ("scales", -torch.ones(3), "scales of .*: must be finite numbers from 0, for each of 3 members"),
        ("scales", torch.ones(4), "scales of .* for each of 3 members"),
        ("bias", torch.ones(1, 5), "'bias' of .* must be 1-d"),
        ("bias", torch.ones(4), "bias of .*: must be 5 finite numbers, one per class"),
        ("bias", torch.tensor([0.0, torch.nan, 0, 0, 0]), "bias of .*: must be 5 finite numbers, one per class"),
        ("smoothing", torch.zeros(1), "smoothing of .*: must be 1 positive numbers"),
        ("smoothing", torch.ones(2), "smoothing of .*: must be 1 positive"),
    ],
)
def test_tensors_that_are_no_pool_s_are_refused(name: str, key: str, value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_combiner(name, {"counts": COUNTS, key: value})


def test_calibrated_scales_make_members_equally_loud_whatever_their_logits_are() -> None:
    answers = logits(seed=3)
    loud = answers * torch.tensor([1.0, 100.0, 0.2]).view(3, 1, 1) + torch.tensor([5.0, 0.0, -3.0]).view(3, 1, 1)
    quiet, other = OpinionPool("log", COUNTS), OpinionPool("log", COUNTS)
    quiet.calibrate(answers)
    other.calibrate(loud)
    torch.testing.assert_close(other.scales * torch.tensor([1.0, 100.0, 0.2]), quiet.scales, rtol=1e-4, atol=0)
    torch.testing.assert_close(other.bias, quiet.bias, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(quiet.scales, 1 / (answers - answers.mean(2, keepdim=True)).square().mean((1, 2)).sqrt())


def test_member_that_hardly_answers_noise_is_scaled_by_ten_times_the_median_at_most() -> None:
    answers = logits(seed=3)
    answers[1] *= 1e-4
    pool = OpinionPool("log", COUNTS)
    pool.calibrate(answers)
    sizes = (answers - answers.mean(2, keepdim=True)).square().mean((1, 2)).sqrt()
    assert float(pool.scales[1]) == pytest.approx(10 / float(sizes.median()), rel=1e-4)


def test_member_that_answers_all_noise_alike_gets_no_scale() -> None:
    answers = logits()
    answers[1] = 3.0
    pool = OpinionPool("log", COUNTS)
    pool.calibrate(answers)
    assert pool.scales[1] == 0
    assert bool(pool.bias.isfinite().all())


def test_balanced_bias_makes_every_class_as_frequent_as_wanted() -> None:
    evidence = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0.0, -1.0, 0.0])
    wanted = torch.tensor([0.1, 0.2, 0.7, 0.0])
    bias = balancing_bias(evidence, wanted)
    predicted = torch.softmax((evidence + bias) / COUNTING, dim=1).mean(0)
    torch.testing.assert_close(predicted, wanted, rtol=0, atol=0.005)


def test_calibration_of_clients_that_hold_nothing_is_finite(name: str) -> None:
    pool = POOLS[name](torch.zeros(3, 5))
    pool.calibrate(logits())
    assert bool(pool(logits(seed=1)).isfinite().all())
    assert pool(logits(seed=1)).softmax(1).tolist() == [[pytest.approx(0.2)] * 5] * 11


def test_class_shares_of_a_class_sum_to_one_or_to_zero() -> None:
    shares = class_shares(COUNTS)
    torch.testing.assert_close(shares.sum(0), torch.tensor([1.0, 1, 1, 1, 0]))
    torch.testing.assert_close(shares[:, 0], torch.tensor([30.0, 1, 0.5]) / 31.5)


def test_log_priors_are_distributions_in_which_no_class_is_impossible() -> None:
    priors = log_priors(torch.cat([COUNTS, torch.zeros(1, 5)]), torch.tensor([0.1])).exp()
    torch.testing.assert_close(priors.sum(1), torch.ones(4))
    torch.testing.assert_close(priors[3], torch.full((5,), 0.2))
    # (30 + 0.1 * 35) / (35 * 1.5), and the rest of a class without an example.
    torch.testing.assert_close(priors[0, [0, 1]], torch.tensor([33.5, 3.5]) / 52.5)


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


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="rule of an opinion pool is 'lgo': must be one of 'log', 'linear'"):
        OpinionPool("lgo", torch.ones(2, 3))
