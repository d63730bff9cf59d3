import math

import pytest
import torch
from fused_fakes import First
from fused_fakes import made as fused_blocks
from torch import Tensor, nn

from strategies.combiners.combiners import (
    COMBINERS,
    LabelCount,
    Mean,
    MeanProbability,
    Weighted,
    build_combiner,
    weighted_mean_gradient,
)
from strategies.combiners.expert_gate import ExpertGate, PixelGate
from strategies.combiners.gate import Gate, start_gate
from strategies.combiners.open_set import OpenSet
from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.prototypes import Prototypes
from strategies.combiners.trained import Linear, PerClass, TwoLayers, Voting
from strategies.combiners.two_class import TwoClassLabelCount, TwoClassLinear, TwoClassMean, TwoClassTwoLayers
from strategies.combiners.update_gate import GatedPool, lower_part
from strategies.combiners.voting import FLOOR
from strategies.teacher.copies import built

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
    return GatedPool(pool, bases, torch.tensor([2.0]), lower_part(built(member))[1] or nn.Identity())


GATE = start_gate(0, members=2, classes=3, input_shape=(1, 16, 16))
BUILT: dict[str, nn.Module] = {
    "mean": Mean(),
    "mean-probability": MeanProbability(),
    "weighted": Weighted([1.0, 3.0]),
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


def test_weighted_with_a_duplicate_member_equals_weight_two() -> None:
    logits = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))
    doubled = torch.cat([logits, logits[:1]])
    torch.testing.assert_close(Weighted([2.0, 1.0, 1.0])(logits), Mean()(doubled))


@pytest.mark.parametrize("name", COMBINERS)
def test_build_from_the_state_dict_gives_the_same_bits(name: str) -> None:
    rebuilt = build_combiner(name, BUILT[name].state_dict(), MEMBERS.get(name))
    given = drawn(name)
    assert torch.equal(rebuilt(*given), BUILT[name](*given))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [[1.0], [2.0]]])
def test_weighted_with_invalid_weights_is_refused(weights: object) -> None:
    with pytest.raises(ValueError, match="weights per member"):
        Weighted(weights)  # type: ignore[arg-type]


def test_weighted_mean_gradient_of_two_members_equals_the_one_by_hand() -> None:
    # A = (1, 0); sm(A) = (s, 1 - s) with s = e / (1 + e); the residual is (s - 1, 1 - s).
    logits = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]])
    s = torch.tensor(1.0).sigmoid()
    expected = torch.stack([-(s - 1) / 2, (s - 1) / 2])  # <z_k - A, r> = (z_k1 - 1) (s - 1), over b sum w = 2
    torch.testing.assert_close(weighted_mean_gradient(torch.ones(2), logits, torch.tensor([0])), expected)
