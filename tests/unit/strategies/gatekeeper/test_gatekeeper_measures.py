from __future__ import annotations

import math

import pytest
import torch
from gatekeeper_fakes import Operations

from strategies.gatekeeper import measures
from strategies.gatekeeper.evidence import Behaviour, Evidence, Trigger
from strategies.gatekeeper.findings import Cohort, backdoored, copied
from strategies.gatekeeper.inspection import cohort_of
from strategies.gatekeeper.probes import moved, noise_images, stamped
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


def test_the_vector_of_a_small_model_is_its_weights_and_of_a_large_one_keeps_distances() -> None:
    small = {
        "a.weight": torch.tensor([[1.0, 2.0]]),
        "a.running_mean": torch.tensor([9.0]),
        "a.bias": torch.tensor([3.0]),
    }
    one, other = torch.randn(300_000, generator=rng(1)), torch.randn(300_000, generator=rng(2))

    vectors = [measures.weight_vector({"w": value}, rng()) for value in (one, other)]

    assert measures.weight_vector(small, rng()).tolist() == [1.0, 2.0, 3.0]
    assert len(vectors[0]) == measures.VECTOR
    sketched = float(measures.distances(vectors)[0, 1])
    assert sketched == pytest.approx(float(torch.linalg.vector_norm(one - other)), rel=0.03)


@pytest.mark.parametrize(
    ("values", "expected"), [([], NAN), ([NAN], NAN), ([3.0], 3.0), ([9.0, 1.0, NAN, 2.0], 2.0), ([1.0, 4.0], 2.5)]
)
def test_median_of_known_values(values: list[float], expected: float) -> None:
    assert measures.median(values) == pytest.approx(expected, nan_ok=True)


def test_ratios_compare_each_with_the_nearer_half_of_the_others() -> None:
    assert measures.ratios([1.0, 1.0, 20.0]) == [1.0, 1.0, 20.0]
    assert measures.ratios([2.0, 4.0, 40.0]) == [0.5, 2.0, 10.0]
    assert measures.ratios([1.0, NAN, 0.0, 2.0])[0] == 0.5
    assert all(map(math.isnan, measures.ratios([1.0])))


def test_extreme_ratio_names_the_layer_that_is_farthest_off() -> None:
    norms = [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 0.1}, {"a": 1.0, "b": 1.0}]

    assert measures.extreme_ratio(norms)[1] == ("b", 0.1)
    assert measures.distance_of(0.1) == pytest.approx(measures.distance_of(10.0))
    assert measures.distance_of(0.0) == math.inf
    assert measures.distance_of(NAN) == 0.0


def test_sizes_and_variation_of_logits() -> None:
    logits = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])

    assert measures.logit_size(logits) == 1.0
    assert measures.variation(logits) == 1.0
    assert measures.variation(torch.tensor([[1.0, -1.0], [6.0, 4.0]])) == 0.0  # the same prediction, shifted


def test_distances_of_vectors_of_different_length_are_not_known() -> None:
    apart = measures.distances([torch.zeros(2), torch.tensor([3.0, 4.0]), torch.zeros(3)])

    assert apart[0, 1] == apart[1, 0] == 5.0
    assert apart.isnan().sum() == 7


def test_likeness_is_the_median_cosine() -> None:
    vectors = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])]

    assert measures.likeness(vectors) == [0.5, 0.5, 0.0]


def test_the_search_for_copies_takes_as_many_operations_as_there_are_pairs() -> None:
    def operations(clients: int) -> int:
        names, vectors = [f"c{k}" for k in range(clients)], [torch.randn(8, generator=rng(k)) for k in range(clients)]
        known, norms = torch.ones(clients, 3, dtype=torch.bool), [{"w": 1.0}] * clients
        evidence = Evidence(names, ["net"] * clients, known, norms, [{}] * clients, vectors, None)
        cohort = cohort_of(evidence)
        with Operations() as counted:
            assert copied(cohort, evidence, ()) == [None] * clients
        return counted.count

    assert operations(45) < 12 * operations(15)


def test_the_usual_distance_is_not_stretched_by_one_that_is_far_off() -> None:
    apart = measures.distances([torch.tensor([x]) for x in (0.0, 1.0, 2.0, 100.0)])

    nearest = measures.nearest_distances(apart)
    assert nearest == [1.0, 1.0, 1.0, 98.0]
    assert measures.UsualDistance(nearest, [0, 1, 2, 3]).without(0, 1) == 1.0
    assert math.isnan(measures.UsualDistance(nearest, [0, 1]).without(0, 1))


def test_the_usual_distance_is_the_lower_median_and_sorts_its_witnesses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = [measures.NAN, *torch.randint(0, 5, (12,), generator=rng(0)).double().tolist()]
    for witnesses in (range(13), range(12), range(3, 9)):
        usual = measures.UsualDistance(nearest, witnesses)
        with monkeypatch.context() as patch:
            patch.setattr(measures, "math", None)  # which reading the witnesses again would need
            found = {(k, j): usual.without(k, j) for k in range(13) for j in range(13) if k != j}
        for pair, value in found.items():
            others = sorted(nearest[k] for k in witnesses if k not in (0, *pair))
            assert value == others[(len(others) - 1) // 2]


def test_pair_agreement_looks_at_classes_that_both_know_alone() -> None:
    labels, makers = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, 2])
    predictions = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [2, 2, 2, 2]])
    known = torch.tensor([[True, True, False], [True, False, False], [False, False, True]])

    agreed = measures.pair_agreement(predictions, labels, makers, known)

    assert agreed[0, 1] == agreed[1, 0] == 1.0
    assert agreed[2].isnan().all()


def test_mapping_finds_the_class_that_another_is_taken_for() -> None:
    labels, seen = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([3, 3, 0, 1, 0])

    found, steady = measures.mapping(seen, labels, torch.tensor([True, True, False, False]))

    assert found == {0: 3, 1: 1}
    assert steady == pytest.approx((2 / 3 + 1) / 2)


def test_influence_of_equal_clients_is_nothing_and_of_an_odd_one_most() -> None:
    same = torch.randn(5, 3, generator=rng())

    assert measures.influence(torch.stack([same, same, same])) == pytest.approx([0.0] * 3, abs=1e-12)
    one = measures.influence(torch.stack([same, same, -5 * same]))
    assert one[2] > one[0] == one[1]


def test_robust_scores_count_deviations_of_the_others_and_never_less_than_the_floor() -> None:
    assert measures.robust_scores([1.0, 1.0, 3.0], 0.5)[2] == 4.0
    spread = measures.robust_scores([0.0, 2.0, 4.0, 13.0], 0.01)[3]
    assert spread == pytest.approx((13 - 2) / (2 * measures.MAD_TO_DEVIATION))


def test_noise_is_of_three_kinds_within_the_range_of_pixels_and_the_same_for_a_seed() -> None:
    images = noise_images(7, (3, 8, 8), rng(4))

    assert images.shape == (7, 3, 8, 8)
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.equal(images, noise_images(7, (3, 8, 8), rng(4)))
    rough = (images[..., 1:] - images[..., :-1]).abs().mean((1, 2, 3))
    assert rough[2] < rough[0]  # the third is smooth


def test_a_stamp_replaces_the_masked_pixels() -> None:
    mask = torch.zeros(1, 2, 2)
    mask[0, 0, 0] = 1.0

    shown = stamped(torch.full((3, 1, 2, 2), 0.5), mask, torch.ones(1, 2, 2))

    assert shown[:, 0].tolist() == [[[1.0, 0.5], [0.5, 0.5]]] * 3


def test_moved_counts_those_that_were_not_there_before() -> None:
    before, after = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 0, 2, 0])

    assert moved(before, after, 0) == pytest.approx(2 / 3)
    assert math.isnan(moved(torch.zeros(2), torch.zeros(2), 0))


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

    found = backdoored(0, Cohort(measures, ("",) * 3, apart, apart), evidence)

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


def test_agreement_of_pairs_is_that_of_each_pair() -> None:
    drawn = rng(1)
    clients, classes = 6, 4
    labels, makers = torch.randint(classes, (90,), generator=drawn), torch.randint(clients - 1, (90,), generator=drawn)
    predictions = torch.randint(classes, (clients, 90), generator=drawn)
    known = torch.rand(clients, classes, generator=drawn) < 0.6
    found = measures.pair_agreement(predictions, labels, makers, known, least=3)
    for k in range(clients):
        for j in range(clients):
            shares = []
            for one, other in ((k, j), (j, k)):
                mask = (makers == other) & known[one][labels]
                enough = k != j and int(mask.sum()) >= 3
                shares.append(float((predictions[one] == labels)[mask].double().mean()) if enough else math.nan)
            assert float(found[k, j]) == pytest.approx(sum(shares) / 2, nan_ok=True)


def test_twice_as_many_clients_take_about_twice_as_many_operations() -> None:
    def operations(clients: int) -> int:
        vectors, known = torch.randn(clients, 8, generator=rng()), torch.ones((clients, 3), dtype=torch.bool)
        answers, makers = torch.zeros((clients, clients), dtype=torch.int64), torch.arange(clients)
        with Operations() as counted:
            measures.distances([*vectors])
            measures.likeness([*vectors])
            measures.pair_agreement(answers, makers % 3, makers, known)
        return counted.count

    assert operations(80) < 2.2 * operations(40)
