"""Scores from integer sums: hand-worked cases, exact addition, AUROC's bound, coverage of the intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import permutations
from operator import add
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from strategies.core.errors import UploadError
from strategies.scores.sums import LARGEST_LOSS, ONE, SHARES, Answers, Sums, pack, pack_pair, unpack, unpack_pair
from strategies.scores.values import (
    Score,
    auroc_bound,
    calibration_error,
    describe,
    differences,
    gain,
    per_class,
    scores_of,
    verdict,
)

ALL = ("accuracy", "balanced-accuracy", "macro-f1", "auroc", "log-loss")


def logits_of(probabilities: list[list[float]]) -> torch.Tensor:
    """Return logits with these probabilities."""
    return torch.tensor(probabilities, dtype=torch.float64).log().clamp(min=-1e4)


def sums_of(logits: torch.Tensor, labels: torch.Tensor | list[int], groups: list[int] | None = None) -> Sums:
    """Return the sums of logits."""
    return Answers.of(logits, torch.as_tensor(labels)).sums(None if groups is None else np.array(groups))


def drawn(
    n: int, shares: Sequence[float], *, seed: int, scale: float = 2.0, known: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that know something of the labels, and labels with these shares of the classes."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.choice(len(shares), n, p=shares))
    logits = torch.from_numpy(rng.normal(size=(n, len(shares))).astype(np.float32))
    logits[torch.arange(n), labels] += known
    return scale * logits, labels


def even(classes: int) -> tuple[float, ...]:
    """Return equal shares of so many classes."""
    return (1 / classes,) * classes


def test_scores_of_hand_worked_cases() -> None:
    one_hot = 10 * torch.eye(3)
    found = scores_of(sums_of(one_hot[[0, 2, 1, 1]], [0, 0, 1, 1]))
    assert found["balanced-accuracy"].value == 0.75  # class 2 is predicted, and absent
    assert found["accuracy"].value == 0.75
    assert found["macro-f1"].value == pytest.approx((2 / 3 + 1) / 2)
    assert scores_of(sums_of(one_hot[[0, 1]], [0, 1]))["auroc"].value == 1.0  # class 2 has no AUROC
    assert scores_of(sums_of(logits_of([[0, 1], [0, 1]]), [0, 1]))["auroc"].value == 0.5
    assert scores_of(sums_of(torch.zeros(0, 3), [])) == {}
    assert "auroc" not in scores_of(sums_of(one_hot[:1], [0]))


def test_calibration_bins_hold_the_upper_end_and_their_lower_edge() -> None:
    two = sums_of(logits_of([[0.05, 0.95], [0, 1]]), [1, 0])
    error, perfect = calibration_error(two) or (0.0, 0.0)
    assert error == pytest.approx(0.475, abs=1e-6)
    assert 0 < perfect < error
    fifth = sums_of(torch.zeros(1, 5), [0])
    assert fifth.calibration[0].nonzero()[0].tolist() == [min(int(15 * np.float64(np.float32(0.2))), 14)] == [3]


def test_a_calibrated_model_shows_the_error_that_is_expected_of_it() -> None:
    rng, errors = np.random.default_rng(0), []
    probabilities = rng.dirichlet(np.ones(10), size=200)
    for _ in range(30):
        labels = torch.from_numpy(np.array([rng.choice(10, p=row) for row in probabilities]))
        errors.append(calibration_error(sums_of(torch.from_numpy(probabilities).log(), labels)))
    measured, expected = np.mean([error for error in errors if error], axis=0)
    assert measured == pytest.approx(expected, rel=0.15)


def test_a_model_with_nan_has_its_accuracy_alone() -> None:
    logits = 10 * torch.eye(2)[[0, 1, 1]]
    logits[0, 1] = torch.nan
    assert scores_of(sums_of(logits, [0, 1, 1])).keys() == {"accuracy"}


@pytest.mark.parametrize("clients", [1, 3, 20, 100])
def test_sums_of_clients_are_those_of_their_examples_together(clients: int) -> None:
    logits, labels = drawn(400, even(4), seed=clients)
    rng = np.random.default_rng(clients)
    order, cuts = rng.permutation(400), np.sort(rng.integers(0, 401, clients - 1))
    parts = [np.sort(part) for part in np.split(order, cuts)]  # classes are missing, and some clients are empty
    together, whole = reduce(add, (sums_of(logits[part], labels[part]) for part in parts)), sums_of(logits, labels)
    for name in ("examples", "correct", "confusion", "loss", "calibration", "histogram"):
        assert np.array_equal(getattr(together, name), getattr(whole, name)), name
    pooled, exact = scores_of(together), scores_of(whole)
    assert {name: score for name, score in pooled.items() if name != "auroc"} == {
        name: score for name, score in exact.items() if name != "auroc"
    }
    assert abs(pooled["auroc"].value - exact["auroc"].value) <= auroc_bound(together) + 1e-12
    assert auroc_bound(whole) == 0


@pytest.mark.parametrize("scale", [0.05, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("share", [0.001, 0.1])
def test_auroc_is_within_its_bound_of_scikit_learn_and_the_confusion_matrix_is_its(scale: float, share: float) -> None:
    from sklearn.metrics import confusion_matrix, roc_auc_score

    logits, labels = drawn(3000, (1 - share, share), seed=1, scale=scale)
    scores = logits.softmax(1)[:, 1].double()  # float32 scores, exact thresholds
    wanted = float(roc_auc_score(labels, scores))
    whole = sums_of(logits, labels)
    halves = sums_of(logits[:1500], labels[:1500]) + sums_of(logits[1500:], labels[1500:])
    assert scores_of(whole)["auroc"].value == pytest.approx(wanted, abs=1e-6)
    assert whole.confusion is not None
    assert (whole.confusion == confusion_matrix(labels, logits.argmax(1), labels=[0, 1])).all()
    bound = auroc_bound(halves)
    assert abs(scores_of(halves)["auroc"].value - wanted) <= bound + 1e-6
    (said,) = (note for note in describe(halves)["notes"] if note.startswith("AUROC is exact to "))
    assert bound <= float(said.split()[4]) / 100 <= bound + 1e-4  # in points, never less than it is
    assert not any("AUROC is exact" in note for note in describe(whole)["notes"])


def class_scores(model: Answers) -> dict[str, Any]:
    """Return the scores of every class, those of all examples once for each."""
    sums, whole = model.sums(), scores_of(model.sums())
    right = np.diag(sums.confusion)
    same = {name: np.full(len(right), whole[name].value) for name in ("accuracy", "log-loss")}
    areas = [row["auroc"]["value"] if row["auroc"] else np.nan for row in per_class(sums)]
    f1 = 2 * right / (sums.confusion.sum(0) + sums.confusion.sum(1))
    return {**same, "balanced-accuracy": right / sums.confusion.sum(1), "macro-f1": f1, "auroc": np.array(areas)}


@cache
def truth_of(shares: tuple[float, ...], scale: float, known: float) -> dict[str, Any]:
    """Return the scores of every class on many examples."""
    return class_scores(Answers.of(*drawn(100_000, shares, seed=0, scale=scale, known=known)))


def covers(found: dict[str, Score], truth: dict[str, Any], labels: Any) -> dict[str, bool]:
    """Return whether each score's interval holds the truth of the classes that are there."""
    own = {"auroc": np.array([1])} if len(truth["auroc"]) == 2 else {}
    truths = {name: truth[name][own.get(name, np.unique(labels))].mean() for name in found}
    return {name: score.low <= truths[name] <= score.high for name, score in found.items()}


RARE, SEVERAL = (0.9, 0.1), (0.6, 0.25, 0.1, 0.05)
# The shares of classes, what a model knows and how sure it is of it, the examples, the scores, how many are covered.
COVERED = [
    *[(RARE, 1.0, 2.0, n, ALL, (0.90, 0.999)) for n in (20, 200)],
    *[(shares, 2.0, scale, n, ("macro-f1", "log-loss"), (0.89, 1)) for shares in (RARE, SEVERAL)
      for scale in (0.5, 2.0, 5.0) for n in (20, 50, 200)],
    *[(even(classes), known, 1.0, n, ("macro-f1",), (0.93, 1))  # good models, and many classes
      for classes, known, n in ((2, 4.0, 100), (2, 2.0, 20), (10, 3.0, 50), (10, 2.0, 20), (20, 3.0, 100))],
]  # fmt: skip


@pytest.mark.parametrize(("shares", "known", "scale", "n", "names", "share"), COVERED)
def test_intervals_cover_the_truth(
    shares: tuple[float, ...], known: float, scale: float, n: int, names: tuple[str, ...], share: tuple[float, float]
) -> None:
    truth = truth_of(shares, scale, known)
    models = [Answers.of(*drawn(n, shares, seed=seed, scale=scale, known=known)) for seed in range(1, 201)]
    found = pd.DataFrame([covers(scores_of(one.sums()), truth, one.labels) for one in models]).astype(float).mean()
    assert found[list(names)].between(*share).all(), found  # 95 % but for the draw of 200 models


@pytest.mark.parametrize("n", [20, 50, 200])
def test_intervals_of_log_loss_cover_the_truth_of_models_that_are_sure_and_seldom_wrong(n: int) -> None:
    """Two models are wrong on 5 and 2 % of the examples, each time at 50 nats."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(300):
        labels = rng.integers(0, 2, n)
        said = [np.where(rng.random(n) < wrong, 1 - labels, labels) for wrong in (0.05, 0.02)]
        models = [Answers.of(50 * torch.eye(2)[torch.from_numpy(each)], torch.from_numpy(labels)) for each in said]
        alone, apart = scores_of(models[0].sums())["log-loss"], paired(*models)["log-loss"]
        covered.append([alone.low <= 2.5 <= alone.high, apart.low <= 1.5 <= apart.high])
    assert (np.mean(covered, axis=0) >= 0.9).all(), np.mean(covered, axis=0)


def test_a_model_without_a_mistake_is_counted_one_that_costs_half() -> None:
    """Of 20 right answers, each with exp(-30) for the other class."""
    found = scores_of(sums_of(30 * torch.eye(2)[[0, 1] * 10], [0, 1] * 10))["log-loss"]
    mean = 15 / 21
    end = mean * np.exp(2.085963 * ((15**2 / 21 - mean**2) / 20) ** 0.5 / mean)  # t of 20 degrees
    assert found.high == pytest.approx(end, rel=0.02)  # by the width of a bin


def test_no_interval_of_a_log_loss_passes_the_largest_loss() -> None:
    """Five wrong answers of one patient, of whose loss the sums cannot say more."""
    wrong, right = (Answers.of(30 * torch.eye(2)[[label] * 5], torch.zeros(5, dtype=torch.long)) for label in (1, 0))
    groups = np.zeros(5, np.int64)
    for model in (wrong, right):
        alone = scores_of(model.sums(groups))["log-loss"]
        assert alone.low <= alone.value <= alone.high <= LARGEST_LOSS
    for found in (
        paired(wrong, right, groups)["log-loss"],
        gain(wrong.sums(groups), right.sums(groups), wrong.against(right, 2), "log-loss"),
    ):
        assert found is not None
        assert -LARGEST_LOSS <= found.low <= found.value <= found.high <= LARGEST_LOSS


def test_the_interval_of_macro_f1_is_worked_by_hand() -> None:
    """One of two classes: 3 of 4 examples that have it or are predicted as it are right, so that F1 is 6/7."""
    found = scores_of(sums_of(10 * torch.eye(2)[[1, 1, 1, 0]], [1, 1, 1, 1]))["macro-f1"]
    z = 1.959964
    middle, half = 0.75 + z**2 / 8, z * (0.75 * 0.25 / 4 + z**2 / 64) ** 0.5
    low = (middle - half) / (1 + z**2 / 4)  # the lower end by Wilson is farther
    added = z * ((3 * 2**2 + 6**2) / 49**2 + 0.3 / 16) ** 0.5  # a right example adds 2/49, the wrong one takes 6/49
    assert found.value == pytest.approx(6 / 7)
    assert (found.low, found.high) == pytest.approx((2 * low / (1 + low), min(1.0, 6 / 7 + added)), abs=1e-6)


def test_intervals_of_few_or_no_examples_are_wide_and_hold_the_value() -> None:
    for n in (1, 2, 3):
        for name, score in scores_of(sums_of(10 * torch.eye(3)[:n], list(range(n)))).items():
            assert score.low <= score.value <= score.high, name
            assert score.high - score.low > 0.1 or name == "log-loss", name


def test_groups_are_counted_by_hand() -> None:
    """Patients 7, 7, 7, 9, 3 with right answers 1, 1, 0, 1, 0: k is 2, 1, 0 of m = 3, 1, 1."""
    logits = 10 * torch.eye(2)[[1, 1, 0, 1, 0]]
    assert sums_of(logits, [1] * 5, [7, 7, 7, 9, 3]).groups == (5, 7, 11)


def test_images_of_one_patient_count_as_few() -> None:
    """Five images each of 40 patients, right or wrong together in most cases."""
    rng = np.random.default_rng(0)
    truth, covered, alone = 0.8, 0, 0
    groups = np.repeat(np.arange(40), 5).tolist()
    for _ in range(150):
        same, own = rng.random(40) < truth, rng.random((40, 5)) < truth
        right = np.where(rng.random((40, 5)) < 0.6**0.5, same[:, None], own).ravel()
        logits = 10 * torch.eye(2)[torch.from_numpy(right).long()]
        grouped, single = (scores_of(sums_of(logits, [1] * 200, of))["accuracy"] for of in (groups, None))
        covered += grouped.low <= truth <= grouped.high
        alone += single.low <= truth <= single.high
    assert covered / 150 >= 0.9 > 0.85 > alone / 150


def test_a_gain_counts_the_examples_that_changed() -> None:
    labels = torch.zeros(40, dtype=torch.long)
    before, after = torch.eye(2)[[1] * 20 + [0] * 20], torch.eye(2)[[1] * 5 + [0] * 33 + [1] * 2]
    first, second = Answers.of(5 * before, labels), Answers.of(5 * after, labels)
    pair = first.against(second, 2)
    assert pair.discordant.tolist() == [[15, 2], [0, 0]]
    for metric in ("accuracy", "balanced-accuracy"):
        found = gain(first.sums(), second.sums(), pair, metric)
        assert found.value == pytest.approx(13 / 40)
        assert verdict(found) == "gains"
    lower = gain(first.sums(), second.sums(), pair, "log-loss")
    assert lower.value > 0
    same = gain(first.sums(), first.sums(), first.against(first, 2), "accuracy")
    assert same is not None
    assert verdict(same) == "ties"


def of_scores(positive: list[float], negative: list[float]) -> Answers:
    """Return the answers of a model with these probabilities of class 1."""
    scores = np.array([*positive, *negative])
    return Answers.of(logits_of(np.stack([1 - scores, scores], axis=1).tolist()),
                      torch.tensor([1] * len(positive) + [0] * len(negative)))  # fmt: skip


def test_a_gain_in_auroc_is_worked_by_hand() -> None:
    """Placements 1, 1/2 of ill and 1/2, 1 of healthy patients under a first model; all 1 under a second one."""
    first, second = of_scores([0.8, 0.4], [0.6, 0.2]), of_scores([0.9, 0.7], [0.6, 0.2])
    pair = first.against(second, 2)
    assert pair.areas == (ONE // 8, ONE // 8)
    found = gain(first.sums(), second.sums(), pair, "auroc")
    half = 1.959964 * (2 * (1 / 8 + 0.1) / 4) ** 0.5
    assert (found.value, found.low, found.high) == pytest.approx((0.25, 0.25 - half, 0.25 + half))


@pytest.mark.parametrize("classes", [2, 4])
def test_the_variance_of_a_gain_in_auroc_is_that_of_all_pairs(classes: int) -> None:
    logits, labels = drawn(60, even(classes), seed=2)
    logits = logits.round(decimals=1)  # ties
    other = (logits + drawn(60, even(classes), seed=3)[0]).round(decimals=1)
    pair = Answers.of(logits, labels).against(Answers.of(other, labels), classes)
    truth, moved = labels.numpy(), np.zeros(60)
    positives = [1] if classes == 2 else range(classes)
    for sign, model in ((-1, logits), (1, other)):
        for label in positives:
            scores, own = model.softmax(1)[:, label].numpy(), truth == label
            wins = np.sign(scores[own][:, None] - scores[~own][None]) / 2 + 0.5  # [p, q]
            moved[own] += sign * (wins.mean(1) - wins.mean()) / own.sum() / len(positives)
            moved[~own] += sign * (wins.mean(0) - wins.mean()) / (~own).sum() / len(positives)
    assert pair.areas is not None
    sizes = np.bincount(truth)
    assert (np.array(pair.areas) / ONE / sizes**2).sum() == pytest.approx((moved**2).sum(), rel=1e-6)


def test_gains_in_auroc_of_a_class_without_examples_and_of_equal_models() -> None:
    equal = of_scores([0.9, 0.8, 0.7], [0.1] * 17)
    found = gain(equal.sums(), equal.sums(), equal.against(equal, 2), "auroc")
    assert verdict(found) == "ties"
    assert found.low < -0.05 < 0.05 < found.high  # three ill patients prove no equality
    alone = of_scores([0.9, 0.8], [])
    assert alone.against(alone, 2).areas is None
    assert gain(alone.sums(), alone.sums(), alone.against(alone, 2), "auroc") is None
    both = equal.against(equal, 2) + equal.against(equal, 2)
    assert both.areas is None
    assert both.loss is not None


def two_models(n: int, shares: Sequence[float], *, seed: int, scale: float = 1.0) -> tuple[Answers, Answers]:
    """Return the answers of two models with errors in common, of which the second one knows more."""
    rng, classes = np.random.default_rng(seed), len(shares)
    labels, common = rng.choice(classes, n, p=shares), rng.normal(size=(n, classes))
    found = []
    for known in (1.0, 1.4):
        logits = 0.9 * common + 0.44 * rng.normal(size=(n, classes))
        logits[np.arange(n), labels] += known
        found.append(Answers.of(scale * torch.from_numpy(logits), torch.from_numpy(labels)))
    return found[0], found[1]


def paired(first: Answers, second: Answers, groups: Any = None) -> dict[str, Score]:
    """Return the differences of two models' scores."""
    classes = 0 if first.probabilities is None else first.probabilities.shape[1]
    return differences(first.effects(), second.effects(), first.labels, classes, groups)


def test_differences_are_worked_by_hand() -> None:
    """Of four examples, two per class, the second model gets one more right."""
    first, second = (Answers.of(torch.tensor(scores).log(), torch.tensor([0, 0, 1, 1]))
                     for scores in ([[0.8, 0.2], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]],
                                    [[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]]))  # fmt: skip
    found, z = paired(first, second), 1.959964
    assert tuple(found) == ALL
    half = z * (3 / 6 - (1 / 6) ** 2) ** 0.5 / 6**0.5  # with an example more for either model
    assert found["accuracy"].as_json() == pytest.approx(
        {"value": 0.25, "low": 1 / 6 - half, "high": 1 / 6 + half}, abs=1e-6
    )
    assert found["balanced-accuracy"].value == pytest.approx(0.25)
    assert found["macro-f1"].value == pytest.approx(1 - (2 / 3 + 4 / 5) / 2)
    # The first model's F1 are 2/3 of three and 4/5 of five, those that have a class and those that are predicted as it.
    # Those of the second one are 1 of four each: no example adds to them.
    moved = np.array([(2 - 2 * 2 / 3) / 3, -(2 / 3 / 3 + 4 / 5 / 5), *[(2 - 2 * 4 / 5) / 5] * 2]) / 2
    half = z * ((moved**2).sum() + 2 * 0.3 / 4 / 4) ** 0.5
    assert found["macro-f1"].high - found["macro-f1"].value == pytest.approx(half, abs=1e-6)
    less = np.log(0.6 / 0.4)
    assert found["log-loss"].value == pytest.approx(less / 4)
    error = ((less**2 + 2 * np.log(2) ** 2) / 6 - (less / 6) ** 2) ** 0.5 / 5**0.5
    assert found["log-loss"].high == pytest.approx(less / 6 + 2.570582 * error, abs=1e-6)  # t of 5 degrees


@pytest.mark.parametrize("shares", [(0.7, 0.3), (0.6, 0.2, 0.15, 0.05)])
def test_effects_are_what_a_heavier_example_adds_to_the_score(shares: tuple[float, ...]) -> None:
    """Each is the score, and n times its derivative by the example's weight."""
    model, n = two_models(50, shares, seed=3)[0], 50
    assert model.probabilities is not None
    truth, guess, scores = model.labels, model.predicted, model.probabilities

    def weighted(weights: Any) -> dict[str, float]:
        f1, areas = [], []
        for label in np.unique(truth):
            own, said = truth == label, guess == label
            f1.append(2 * weights[own & said].sum() / (weights[own].sum() + weights[said].sum()))
            if len(shares) > 2 or label == 1:
                pairs = weights[own][:, None] * weights[~own]
                wins = (np.sign(scores[own, label][:, None] - scores[~own, label]) + 1) / 2
                areas.append((pairs * wins).sum() / pairs.sum())
        return {"macro-f1": float(np.mean(f1)), "auroc": float(np.mean(areas))}

    found, step = model.effects(), 1e-5
    for name, score in weighted(np.ones(n)).items():
        assert found[name].mean() == pytest.approx(score)
        ends = [
            [weighted(np.ones(n) + sign * step * (np.arange(n) == place))[name] for sign in (-1, 1)]
            for place in range(n)
        ]
        assert found[name] == pytest.approx([score + n * (high - low) / step / 2 for low, high in ends], abs=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_differences_are_those_of_sums_and_of_no_order(classes: int) -> None:
    first, second = two_models(60, [1 / classes] * classes, seed=1)
    found, pair = paired(first, second), first.against(second, classes)
    for name in ("accuracy", "balanced-accuracy", "auroc", "log-loss"):
        by_sums = gain(first.sums(), second.sums(), pair, name)
        assert found[name].as_json() == pytest.approx(by_sums.as_json(), abs=2e-6), name
    apart = gain(first.sums(), second.sums(), None, "auroc")
    assert found["auroc"].high - found["auroc"].low < 0.7 * (apart.high - apart.low)  # pairing makes it narrow
    order = np.random.default_rng(0).permutation(60)
    turned, back = paired(first.take(order), second.take(order)), paired(second, first)
    for name, score in found.items():
        assert turned[name].as_json() == pytest.approx(score.as_json(), abs=1e-6), name
        assert (back[name].value, back[name].low) == pytest.approx((-score.value, -score.high), abs=1e-9), name


def test_equal_models_differ_by_exactly_nothing_within_an_interval_that_narrows() -> None:
    widths = []
    for n in (20, 2000):
        found = paired(*[two_models(n, (0.8, 0.2), seed=0)[0]] * 2)
        assert [score.value for score in found.values()] == [0.0] * 5
        assert {verdict(score) for score in found.values()} == {"ties"}
        widths.append([score.high - score.low for score in found.values()])
    assert all(few > 5 * many > 0 for few, many in zip(*widths, strict=True))


def test_differences_of_a_model_with_nan_are_those_of_accuracy() -> None:
    first, second = two_models(20, (0.5, 0.5), seed=0)
    assert list(paired(replace(first, probabilities=None, losses=None), second)) == ["accuracy"]


def test_differences_count_groups() -> None:
    """Five equal images of a patient are worth one."""
    single = two_models(40, (0.6, 0.4), seed=2)
    several = [model.take(np.repeat(np.arange(40), 5)) for model in single]
    alone, naive = paired(*single), paired(*several)
    grouped = paired(*several, np.repeat(np.arange(40), 5))
    for name, score in grouped.items():
        assert score.value == pytest.approx(alone[name].value), name
        width, of_patients, of_images = (found[name].high - found[name].low for found in (grouped, alone, naive))
        assert 0.8 * of_patients < width < 1.2 * of_patients, name
        assert width > 1.6 * of_images, name


@pytest.mark.parametrize("shares", [RARE, SEVERAL])
@pytest.mark.parametrize("n", [20, 200])
def test_differences_cover_the_truth(n: int, shares: tuple[float, ...]) -> None:
    before, after = map(class_scores, two_models(100_000, shares, seed=0))
    truth = {name: (-1 if name == "log-loss" else 1) * (after[name] - before[name]) for name in before}
    models = [two_models(n, shares, seed=seed) for seed in range(1, 201)]
    found = pd.DataFrame([covers(paired(*both), truth, both[0].labels) for both in models]).astype(float).mean()
    assert (found >= 0.92).all(), found


def test_every_class_has_its_row_and_absent_ones_no_recall() -> None:
    rows = per_class(sums_of(10 * torch.eye(3)[[0, 2, 1, 1]], [0, 0, 1, 1]), ("a", "b", "c"))
    assert [row["examples"] for row in rows] == [2, 2, 0]
    assert [row["recall"] and row["recall"]["value"] for row in rows] == [0.5, 1.0, None]
    assert [row["precision"] and row["precision"]["value"] for row in rows] == [1.0, 1.0, 0.0]


def in_pairs(seed: int) -> Sums:
    """Return a client's sums, of two images of each patient."""
    return sums_of(*drawn(30, even(3), seed=seed), groups=[number // 2 for number in range(30)])


@pytest.mark.parametrize("share", ["sums", "confusion", "accuracy"])
def test_sums_arrive_as_they_were_sent(share: str) -> None:
    sent = in_pairs(5)
    found, scores = unpack(pack(sent, share), 3, "the result"), scores_of(sent)
    assert found.correct == sent.correct
    wanted = {"sums": ALL, "confusion": ALL[:3], "accuracy": ALL[:1]}[share]
    assert {name: score.value for name, score in scores_of(found).items()} == {
        name: scores[name].value for name in wanted
    }
    assert share != "sums" or scores_of(found) == scores


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("count", lambda array: array - 40),
        ("count", lambda array: array + np.array([1, 0])),
        ("count", lambda array: array * 0 + 2**62),
        ("count", lambda array: array[:1]),
        ("confusion", lambda array: array * 0.5),
        ("confusion", lambda array: array * np.nan),
        ("confusion", lambda array: array - 1),
        ("confusion", lambda array: array[:2, :2]),
        ("confusion", lambda array: array + 2**62),
        ("confusion", lambda array: array[::-1]),
        ("loss", lambda array: array * -1),
        ("loss", lambda array: array + 2**62),
        ("loss", lambda array: array * [1, 0]),  # no numbers have a sum and no squares
        ("loss", lambda array: array * [0, 1]),
        ("calibration", lambda array: array[:, ::-1] * 2),
        ("calibration", lambda array: array + 2**40),
        ("histogram", lambda array: np.roll(array, 1, axis=0)),
        ("histogram", lambda array: array * 2),
        ("twice-u", lambda array: array * 0 + 2**62),
        ("twice-u", lambda array: array * 0),
        ("groups", lambda array: array * 100),
        ("groups", lambda array: array[[0, 2, 2]]),
        ("other", lambda array: array),
    ],
)  # fmt: skip
def test_a_hostile_answer_is_refused_in_one_line(name: str, change: Callable[[Any], Any]) -> None:
    arrays = pack(in_pairs(5), "sums")
    arrays[name] = np.asarray(change(arrays.get(name, np.zeros(1, np.int64))))
    with pytest.raises(UploadError, match="evaluation of the result"):
        unpack(arrays, 3, "the result")


@pytest.mark.parametrize("share", ["sums", "confusion", "accuracy"])
def test_a_pair_that_contradicts_its_models_is_refused(share: str) -> None:
    logits, labels = drawn(30, even(3), seed=5)
    first, second = Answers.of(logits, labels), Answers.of(logits.roll(1, 0), labels)
    one, two = (unpack(pack(answers.sums(), share), 3, "a model") for answers in (first, second))
    arrays = pack_pair(first.against(second, 3), share)
    assert int(unpack_pair(arrays, one, two, "the result").discordant.sum()) > 0
    with pytest.raises(UploadError, match="contradict"):
        unpack_pair({**arrays, "discordant": arrays["discordant"] + np.array([[1, 0]])}, one, two, "the result")
    with pytest.raises(UploadError, match="discordant"):
        unpack_pair({}, one, two, "the result")
    areas = unpack_pair(arrays, one, two, "the result").areas
    assert areas == (first.against(second, 3).areas if share == "sums" else None)
    for false in (np.array([-1, 0, 0]), np.array([2**62] * 3), np.array([31 * ONE, 0, 0]), np.zeros(2, np.int64),
                  np.full(3, np.nan)):  # fmt: skip
        with pytest.raises(UploadError, match="squared influences"):
            unpack_pair({**arrays, "areas": false}, one, two, "the result")
    loss = arrays.get("loss", np.zeros(2, np.int64))
    for false in (loss * [1, 0], loss + np.array([0, 2**62]), loss - [1, 0], loss[:1], loss * np.nan, -loss - 1):
        with pytest.raises(UploadError, match="difference of losses"):
            unpack_pair({**arrays, "loss": false}, one, two, "the result")


def test_a_client_that_shares_less_takes_no_score_from_the_others() -> None:
    whole = [in_pairs(seed) for seed in range(3)]
    parts = [unpack(pack(sums, share), 3, "a") for sums, share in zip(whole, SHARES, strict=True)]
    first, both, every = scores_of(whole[0]), scores_of(whole[0] + whole[1]), scores_of(reduce(add, whole))
    for order in permutations(parts):
        pooled = reduce(add, order)
        found = {name: score.value for name, score in scores_of(pooled).items()}
        assert found == {
            **{name: first[name].value for name in ("auroc", "log-loss")},
            **{name: both[name].value for name in ("balanced-accuracy", "macro-f1")},
            "accuracy": every["accuracy"].value,
        }
        assert [line for line in describe(pooled)["notes"] if " of the 90 " in line] == [
            f"{scores} of the 90 examples: the other answers hold NaN or Inf, or their nodes share less"
            for scores in (
                "recall, balanced accuracy and macro F1 are of 60",
                "AUROC, log loss and calibration error are of 30",
            )
        ]
        # Whoever sends no groups has one for each example, and does not undo those of the others.
        rest = sum(part.examples for part in parts[1:])
        assert pooled.groups[2] == whole[0].groups[2] + rest


def test_a_loss_beyond_float32_counts_as_the_largest() -> None:
    found = sums_of(torch.tensor([[500.0, 0.0]]), [1])
    assert found.loss == (104 * ONE, 104**2 * ONE)
