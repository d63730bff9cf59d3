import pytest
import torch

from strategies.distillation.combiners import (
    COMBINERS,
    LabelCount,
    Mean,
    Weighted,
    build_combiner,
    weighted_mean_gradient,
)

LOGITS = torch.tensor([[[1.0, 2.0, 3.0]], [[5.0, 6.0, 7.0]]])  # M = 2, B = 1, C = 3
BUILT = {
    "mean": Mean(),
    "weighted": Weighted([1.0, 3.0]),
    "label-count": LabelCount([[3, 0, 0], [1, 4, 0]]),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mean", [3.0, 4.0, 5.0]), ("weighted", [4.0, 5.0, 6.0]), ("label-count", [2.0, 6.0, 0.0])],
)
def test_combine_of_two_members_equals_the_sum_by_hand(name: str, expected: list[float]) -> None:
    torch.testing.assert_close(BUILT[name](LOGITS), torch.tensor([expected]))


def test_every_combiner_is_covered_here() -> None:
    assert BUILT.keys() == COMBINERS.keys()


def test_weighted_with_equal_weights_is_the_mean() -> None:
    logits = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Weighted([7.0] * 4)(logits), Mean()(logits))


def test_weighted_with_a_duplicate_member_equals_weight_two() -> None:
    logits = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))
    doubled = torch.cat([logits, logits[:1]])
    torch.testing.assert_close(Weighted([2.0, 1.0, 1.0])(logits), Mean()(doubled))


def test_label_count_of_a_class_that_nobody_holds_is_zero_and_finite() -> None:
    combined = LabelCount([[0, 0, 0], [0, 0, 0]])(LOGITS)
    assert torch.equal(combined, torch.zeros(1, 3))


@pytest.mark.parametrize("name", COMBINERS)
def test_build_from_the_state_dict_gives_the_same_bits(name: str) -> None:
    rebuilt = build_combiner(name, BUILT[name].state_dict())
    logits = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rebuilt(logits), BUILT[name](logits))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [[1.0], [2.0]]])
def test_weighted_of_weights_that_are_none_is_refused(weights: object) -> None:
    with pytest.raises(ValueError, match="weights per member"):
        Weighted(weights)  # type: ignore[arg-type]


def test_build_of_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="label-count, mean, weighted"):
        build_combiner("median", {})


def test_build_with_foreign_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean' cannot be built"):
        build_combiner("mean", {"weights": torch.ones(2)})


def test_weighted_mean_gradient_of_two_members_equals_the_one_by_hand() -> None:
    # A = (1, 0); sm(A) = (s, 1 - s) with s = e / (1 + e); the residual is (s - 1, 1 - s).
    logits = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]])
    s = torch.tensor(1.0).sigmoid()
    expected = torch.stack([-(s - 1) / 2, (s - 1) / 2])  # <z_k - A, r> = (z_k1 - 1) (s - 1), over b sum w = 2
    torch.testing.assert_close(weighted_mean_gradient(torch.ones(2), logits, torch.tensor([0])), expected)


def test_weighted_mean_gradient_equals_automatic_differentiation() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, 3, dtype=torch.float64, generator=rng)
    weights = torch.tensor([0.0, 0.3, 1.0, 0.7], dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (7,), generator=rng)
    combined = torch.einsum("m,mbc->bc", weights, logits) / weights.sum()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(combined, labels), weights)
    torch.testing.assert_close(weighted_mean_gradient(weights.detach(), logits, labels), expected)
