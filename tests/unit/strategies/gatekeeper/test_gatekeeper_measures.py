from __future__ import annotations

import math

import pytest
import torch

from strategies.gatekeeper import measures
from strategies.gatekeeper.evidence import Behaviour, Evidence, Trigger
from strategies.gatekeeper.inspection import Cohort, find_backdoor
from strategies.gatekeeper.verdicts import MEASURES

NAN = float("nan")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_norms_of_a_state_leave_out_biases_statistics_and_counters() -> None:
    state = {
        "conv.weight": torch.tensor([3.0, 4.0]),
        "conv.bias": torch.tensor([9.0]),
        "norm.running_mean": torch.tensor([7.0]),
        "norm.running_var": torch.tensor([1.0, 3.0]),
        "norm.num_batches_tracked": torch.tensor(5),
    }

    assert measures.weight_norms(state) == {"conv.weight": 5.0}
    assert measures.statistic_norms(state) == {"norm.running_var": 2.0}


@pytest.mark.parametrize(
    ("values", "expected"), [([], NAN), ([NAN], NAN), ([3.0], 3.0), ([9.0, 1.0, NAN, 2.0], 2.0), ([1.0, 4.0], 2.5)]
)
def test_median_of_known_values(values: list[float], expected: float) -> None:
    assert measures.median(values) == pytest.approx(expected, nan_ok=True)


def test_the_usual_distance_is_not_stretched_by_one_that_is_far_off() -> None:
    apart = measures.distances([torch.tensor([x]) for x in (0.0, 1.0, 2.0, 100.0)])

    nearest = measures.nearest_distances(apart)
    assert nearest == [1.0, 1.0, 1.0, 98.0]
    assert measures.UsualDistance(nearest, [0, 1, 2, 3]).without(0, 1) == 1.0
    assert math.isnan(measures.UsualDistance(nearest, [0, 1]).without(0, 1))


def test_pair_agreement_looks_at_classes_that_both_know_alone() -> None:
    labels, makers = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, 2])
    predictions = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [2, 2, 2, 2]])
    known = torch.tensor([[True, True, False], [True, False, False], [False, False, True]])

    agreed = measures.pair_agreement(predictions, labels, makers, known)

    assert agreed[0, 1] == agreed[1, 0] == 1.0
    assert agreed[2].isnan().all()


@pytest.mark.parametrize(("size", "harm"), [(5.6, ""), (4.4, "backdoor")])
def test_a_trigger_is_suspect_below_half_the_others(size: float, harm: str) -> None:
    triggers = [Trigger(0, pixels, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), 0.0) for pixels in (size, 10.0, 10.0)]
    sizes = torch.tensor([[size, 12.0], [10.0, 12.0], [10.0, 12.0]])
    none = torch.zeros(0, dtype=torch.long)
    behaviour = Behaviour(torch.zeros(3, 0, 2), none, none, sizes, triggers)
    known, nothing = torch.ones((3, 2), dtype=torch.bool), torch.zeros(1)
    evidence = Evidence(("a", "b", "c"), ("x",) * 3, known, [{}] * 3, [{}] * 3, [nothing] * 3, behaviour)
    measures = {name: [float("nan")] * 3 for name in MEASURES} | {"trigger": [size / 10.0, 1.0, 1.0]}
    apart = torch.full((3, 3), float("nan"), dtype=torch.float64)

    found = find_backdoor(0, Cohort(measures, ("",) * 3, apart, apart), evidence)

    assert (found.kind if found else "") == harm


def test_measures_of_pairs_are_those_of_each_pair_also_of_copies_and_beside_a_huge_model() -> None:
    drawn = rng(0)
    start = 5.0 * torch.randn(9000, generator=drawn)
    vectors = [start + 0.01 * torch.randn(9000, generator=drawn) for _ in range(12)]
    vectors[3], vectors[4], vectors[5] = vectors[2].clone(), vectors[2] + 1e-5, 1e8 * vectors[5]
    vectors += [torch.randn(7, generator=drawn), torch.zeros(7)]
    apart = measures.distances(vectors)
    assert apart[2, 3] == 0.0
    assert torch.equal(apart.nan_to_num(-1.0), apart.T.nan_to_num(-1.0))
    alike = measures.likeness(vectors)
    for k, one in enumerate(vectors):
        others = {j: other.double() for j, other in enumerate(vectors) if j != k and len(other) == len(one)}
        for j, other in others.items():
            assert float(apart[k, j]) == pytest.approx(float((one.double() - other).norm()), rel=1e-6)
        assert bool(apart[k].isnan().sum() == len(vectors) - len(others))
        cosines = [float(torch.cosine_similarity(one.double(), other, dim=0)) for other in others.values()]
        assert alike[k] == pytest.approx(measures.median(cosines), abs=1e-12)
