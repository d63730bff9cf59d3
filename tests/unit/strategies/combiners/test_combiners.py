import itertools
import math

import numpy as np
import pytest
import torch
from fused_fakes import First
from fused_fakes import made as fused_blocks
from torch import Tensor, nn

from strategies.combiners.aggregators import AGGREGATORS, Array, sum_votes, vote_counts
from strategies.combiners.combiners import (
    COMBINERS,
    LabelCount,
    Mean,
    MeanProbability,
    TwoClassLabelCount,
    TwoClassLinear,
    TwoClassMean,
    TwoClassTwoLayers,
    Weighted,
    WeightedSum,
    build_combiner,
)
from strategies.combiners.gate import Gate, start_gate
from strategies.combiners.opinion_pools import RULES, OpinionPool
from strategies.combiners.tally_pool import cap_at_median, correlations, find_agreeing
from strategies.combiners.trained import FLOOR, Linear, PerClass, TwoLayers, Voting
from strategies.combiners.update_gate import GatedPool, lower_part
from strategies.core.seeds import build_module
from strategies.core.seeds import generator as rng
from strategies.methods.fafi import Prototypes
from strategies.methods.fedov import OpenSet
from strategies.methods.intactofl import ExpertGate, PixelGate

LOGITS = torch.tensor([[[1.0, 2.0, 3.0]], [[5.0, 6.0, 7.0]]])  # M = 2, B = 1, C = 3
PAIR = torch.tensor([[[0.0, math.log(3)]], [[1.0, 1.0]]])  # probabilities of class 1: 3/4 and 1/2
LAYERS = {  # hidden units 1 + 5 = 6, and 3 - 7 + 2 < 0
    "weight1": torch.tensor([[1.0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, -1]]),
    "bias1": torch.tensor([0.0, 2.0]),
    "weight2": torch.tensor([[1.0, 1], [0.5, 9], [-1, 0]]),
    "bias2": torch.tensor([0.0, 1.0, 0.0]),
}
PAIR_LAYERS = {  # sigmoid(log 3) = 3/4, sigmoid(0) = 1/2
    "weight1": torch.eye(2),
    "bias1": torch.zeros(2),
    "weight2": torch.tensor([[4.0, 2.0]]),
    "bias2": torch.tensor([1.0]),
}
VOTES = torch.zeros(2, 3, 3)
VOTES[0, 2], VOTES[1, 2], VOTES[:, 1] = torch.tensor([0.0, 1, 3]), torch.tensor([0.0, 2, 2]), torch.tensor([0.0, 4, 0])


def member() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(392, 4), nn.Linear(4, 3))


def gated(rule: str) -> GatedPool:
    pool = OpinionPool(rule, torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 2.0]]))
    bases = torch.linalg.qr(torch.randn(2, 392, 4, generator=torch.Generator().manual_seed(2))).Q.mT
    return GatedPool(pool, bases, torch.tensor([2.0]), lower_part(build_module(member))[1] or nn.Identity())


GATE = start_gate(0, members=2, classes=3, input_shape=(1, 16, 16))
BUILT: dict[str, nn.Module] = {
    "mean": Mean(),
    "mean-probability": MeanProbability(),
    "weighted": Weighted([1.0, 3.0]),
    "weighted-sum": WeightedSum([1.0, 3.0]),
    "label-count": LabelCount([[3, 0, 0], [1, 4, 0]]),
    "linear": Linear(torch.tensor([2.0, -1.0]), torch.tensor([1.0])),
    "per-class": PerClass(torch.tensor([[1.0, 2, 0], [0, 1, -1]])),
    "nn": TwoLayers(**LAYERS),
    "voting": Voting(VOTES),
    "moe": Gate(**{name: torch.from_numpy(value) for name, value in GATE.items()}),
    "expert-gate": ExpertGate(torch.zeros(2, 6), torch.tensor([math.log(3), 0.0])),
    "pixel-gate": PixelGate(torch.linspace(-1, 1, 512).view(2, 256), torch.tensor([0.5, 0.0])),
    "two-class-average": TwoClassMean(),
    "two-class-weighted": TwoClassLabelCount(torch.tensor([[1, 3], [3, 1]])),
    "two-class-per-class": TwoClassLinear(torch.tensor([2.0, 5.0]), torch.tensor([-1.0])),
    "two-class-nn": TwoClassTwoLayers(**PAIR_LAYERS),
    "open-set": OpenSet(1),
    "fused-blocks": fused_blocks("conv"),
    "prototypes": Prototypes(torch.tensor([[3.0, 4.0]]), torch.tensor([7.0, 7.0])),  # of one class, with two features
    # Of whom the first knows class 0 alone, the second class 1; no member knows class 2.
    "linear-pool": OpinionPool("linear", torch.eye(2, 3), smoothing=torch.tensor([1.0])),
    "log-pool": OpinionPool("log", torch.eye(2, 3), smoothing=torch.tensor([1.0])),
    "gated-linear-pool": gated("linear"),
    "gated-log-pool": gated("log"),
}
MEMBERS = {
    "fused-blocks": First,
    "gated-linear-pool": member,
    "gated-log-pool": member,
}  # what a combiner's structure is read from
POOLED = 1 / (1 + 2 * math.e + 2 * math.e**2), math.e / (2 + math.e + 2 * math.e**2)


def drawn(name: str, seed: int = 1, members: int = 2) -> tuple[Tensor, ...]:
    """Return what a combiner is called with: the logits of members, and images where it looks at them."""
    rng = torch.Generator().manual_seed(seed)
    shape = (3, 2, 2) if name == "fused-blocks" else (2,) if name.startswith("two-class-") else (3,)
    logits = torch.randn(members, 9, *shape, generator=rng)
    return (logits, torch.randn(9, 1, 16, 16, generator=rng)) if hasattr(BUILT[name], "sees_input") else (logits,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", [3.0, 4.0, 5.0]),
        # Both say (1, e, e^2) / (1 + e + e^2).
        ("mean-probability", [n - math.log(1 + math.e + math.e**2) for n in range(3)]),
        ("weighted", [4.0, 5.0, 6.0]),
        ("weighted-sum", [16.0, 20.0, 24.0]),
        ("label-count", [2.0, 6.0, 0.0]),
        ("linear", [-2.0, -1.0, 0.0]),
        ("per-class", [1.0, 10.0, -7.0]),
        ("nn", [6.0, 4.0, -6.0]),
        # Both vote for class 2; of class 0 nothing is known but that classes 1 and 2 were seen.
        ("voting", [math.log(1 / 4), 2 * math.log(FLOOR), math.log(3 / 8)]),
        # Both say (1, e, e^2) / (1 + e + e^2), whatever the gate.
        ("expert-gate", [n - math.log(1 + math.e + math.e**2) for n in range(3)]),
        ("two-class-average", [0.0, math.log(5 / 3)]),
        ("two-class-weighted", [0.0, math.log((9 / 16 + 1 / 8) / (7 / 16))]),
        ("two-class-per-class", [0.0, 2 * math.log(3) - 1]),
        ("two-class-nn", [0.0, 5.0]),
        # Both members are alike in what they do not know; the first votes, with 1 / (1 + e + e^2) and e times that.
        ("open-set", [-math.log(1 + math.e + math.e**2), 1 - math.log(1 + math.e + math.e**2)]),
        # The mean of the last two outputs is (4, 5), of length sqrt(41).
        ("prototypes", [32 / math.sqrt(41)]),
        # With priors (2, 1, 1) / 4 and (1, 2, 1) / 4.
        ("linear-pool", [math.log(q) for q in POOLED] + [math.log(torch.finfo(torch.float32).tiny) - 10]),
        ("log-pool", [math.log(q + 1e-4) for q in POOLED] + [math.log(min(POOLED) + 1e-4) - 10]),
    ],
)
def test_combine_of_two_members_equals_the_sum_by_hand(name: str, expected: list[float]) -> None:
    logits = PAIR if name.startswith("two-class-") else LOGITS
    torch.testing.assert_close(BUILT[name](logits), torch.tensor([expected]))


def test_every_combiner_is_covered_here() -> None:
    assert BUILT.keys() == COMBINERS.keys()


@pytest.mark.parametrize("name", COMBINERS)
def test_build_from_the_state_dict_gives_the_same_bits(name: str) -> None:
    rebuilt = build_combiner(name, BUILT[name].state_dict(), MEMBERS.get(name))
    given = drawn(name)
    assert torch.equal(rebuilt(*given), BUILT[name](*given))


@pytest.mark.parametrize("name", [name for name, entry in AGGREGATORS.items() if entry.kind != "trained"])
def test_an_aggregator_without_a_form_in_numpy_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not trained by gradients in numpy"):
        AGGREGATORS[name].start(0, members=2, classes=2)


# Class shares read off a model; the formulas once more in numpy stand in ``tests/reference``.


def test_capped_sizes_are_at_most_the_median() -> None:
    assert cap_at_median(torch.tensor([10.0, 1e9, 20.0])).tolist() == [10.0, 20.0, 20.0]
    assert cap_at_median(torch.tensor([5.0])).tolist() == [5.0]
    # Of two there is no middle: the smaller one is no exaggeration.
    assert cap_at_median(torch.tensor([10.0, 1e9])).tolist() == [10.0, 10.0]
    assert cap_at_median(torch.tensor([])).tolist() == []


def drawn_voting(seed: int, members: int = 3, examples: int = 40, classes: int = 4) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(members, examples, classes)).astype(np.float32), rng.integers(0, classes, examples)


def test_vote_counts_equal_counting_one_by_one() -> None:
    logits, labels = drawn_voting(0)
    expected = np.zeros((3, 4, 4), np.int64)
    for member, example in itertools.product(range(3), range(40)):
        expected[member, labels[example], np.argmax(logits[member, example])] += 1

    counts = vote_counts(logits, labels)

    assert counts.dtype == np.int64
    assert np.array_equal(counts, expected)


def test_merged_counts_are_those_of_the_pooled_examples_in_any_order_of_clients() -> None:
    logits, labels = drawn_voting(1)
    parts = [vote_counts(logits[:, a:b], labels[a:b]) for a, b in ((0, 5), (5, 6), (6, 40))]

    assert np.array_equal(sum_votes(parts), vote_counts(logits, labels))
    assert np.array_equal(sum_votes(parts[::-1]), sum_votes(parts))


@pytest.mark.parametrize("seed", range(5))
def test_the_prediction_is_the_class_with_the_largest_product_by_brute_force(seed: int) -> None:
    counts = 1 + np.random.default_rng(seed).integers(0, 50, (3, 4, 4))  # no share is zero: the floor plays no part
    counts = counts * counts.sum(2).prod(0)[None, :, None] // counts.sum(2, keepdims=True)  # as many per class
    logits, _ = drawn_voting(seed, examples=64)
    shares = counts / counts.sum(2, keepdims=True)
    products = np.array(
        [
            [math.prod(shares[i, r, np.argmax(logits[i, b])] for i in range(3)) for r in range(4)]
            for b in range(logits.shape[1])
        ]
    )

    found = Voting(torch.from_numpy(counts))(torch.from_numpy(logits)).numpy()

    assert np.array_equal(found.argmax(1), products.argmax(1))
    np.testing.assert_allclose(found, np.log(products), rtol=1e-4)


# Which members agree with the others on noise.


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

    assert find_agreeing(logits, 0.3).tolist() == [k != which for k in range(M)]


def test_more_than_half_are_kept_whatever_they_answer() -> None:
    for count in range(1, 8):
        logits = torch.randn(count, N, C, generator=rng(count))
        logits[: count // 2 + 1] = members(0.1, count)[: count // 2 + 1]  # the others agree with no client

        kept = find_agreeing(logits, 1.0)

        assert 2 * int(kept.sum()) > count or count <= 2
        assert kept[: count // 2 + 1].all()
        assert int(kept.sum()) == (count // 2 + 1 if count > 2 else count)


# What the pools promise beside their formulas, which stand in ``tests/reference``.


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


EITHER = pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])


@EITHER
@pytest.mark.parametrize("name", POOLS)
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
    assert bool(z.grad.isfinite().all())


@EITHER
@pytest.mark.parametrize("name", POOLS)
def test_weight_of_zero_leaves_a_member_out(name: str, calibrated: bool) -> None:
    z, weights = logits(), torch.tensor([1.0, 0.0, 0.5])
    silenced, absent = (pool_of(name, m, calibrated=calibrated, weights=weights) for m in ([0, 1, 2], [0, 2]))
    torch.testing.assert_close(silenced(z), absent(z[[0, 2]]))


def test_member_of_weight_zero_may_have_logits_that_are_not_finite() -> None:
    answers = logits(seed=3)
    weights = torch.tensor([1.0, 0.0, 1.0])
    for rule in RULES:
        clean, spoilt = OpinionPool(rule, COUNTS, weights), OpinionPool(rule, COUNTS, weights)
        clean.calibrate(answers)
        broken = answers.clone()
        broken[1], broken[1, ::2] = torch.inf, torch.nan
        spoilt.calibrate(broken)
        assert torch.equal(spoilt.bias, clean.bias)
        assert torch.equal(spoilt(broken), clean(answers))
