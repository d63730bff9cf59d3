"""The gatekeeper names flipped, random, copied and boasting uploads of feature sums, and no honest one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from gatekeeper_fakes import QUICK, Operations, job_of

from strategies.core.facts import UploadFacts
from strategies.gatekeeper.inspection import inspect
from strategies.gatekeeper.sums import Sums, distance
from strategies.method import Upload

CLASSES, FEATURES, CLIENTS = 5, 12, 6
State = dict[str, torch.Tensor]


def examples(seed: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(sizes))
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    rows = centres[labels] + 0.8 * torch.randn(len(labels), FEATURES, generator=rng)
    return torch.nn.functional.normalize(rows).double(), labels


def state(rows: torch.Tensor, labels: torch.Tensor, noise: float = 0.0) -> State:
    upper = torch.triu_indices(FEATURES, FEATURES)
    hot = torch.nn.functional.one_hot(labels, CLASSES).double()
    return {
        "counts": hot.sum(0),
        "sums": (hot.T @ rows).float(),
        "gram": (rows.T @ rows)[upper[0], upper[1]].float(),
        "noise": torch.tensor([noise], dtype=torch.float64),
    }


def honest(skewed: bool = False) -> dict[str, State]:
    """Return clients of which each has all classes, or two of them and a little of the rest."""
    found = {}
    for k in range(CLIENTS):
        sizes = tuple(60 if not skewed or c in (k % CLASSES, (k + 1) % CLASSES) else 4 for c in range(CLASSES))
        found[f"c{k}"] = state(*examples(k, sizes))
    return found


def harms(states: Mapping[str, State], arrived: tuple[str, ...] = ()) -> dict[str, str]:
    uploads = [
        Upload(UploadFacts(name, "statistics", int(own["counts"].sum().clamp_min(1)), None), lambda own=own: own)  # type: ignore[misc]
        for name, own in states.items()
    ]
    found = inspect(job_of(uploads), QUICK, arrived=arrived)
    return {row.client: row.harm for row in found.rows if row.findings}


@pytest.mark.parametrize("skewed", [False, True])
def test_no_honest_client_is_suspect(skewed: bool) -> None:
    assert harms(honest(skewed)) == {}


def flipped() -> State:
    rows, labels = examples(0, (60,) * CLASSES)
    return state(rows, (labels + 1) % CLASSES)


def backwards() -> State:
    rows, labels = examples(0, (60,) * CLASSES)
    return state(rows.flip(1), labels)


def claimed(own: State, factor: int) -> State:
    return {key: value * factor if key != "noise" else value for key, value in own.items()}


@pytest.mark.parametrize(
    ("harmful", "harm"),
    [
        (flipped(), "label-flip"),
        (backwards(), "random"),
        (claimed(honest()["c0"], 100), "scaled"),
        (claimed(flipped(), 10), "label-flip"),  # outweighs all the others together
    ],
)
def test_a_harmful_client_is_the_only_suspect(harmful: State, harm: str) -> None:
    assert harms({**honest(), "c0": harmful}) == {"c0": harm}


def test_a_copy_that_claims_more_is_named_and_the_earlier_client_is_the_original() -> None:
    own = honest()
    more = claimed(own["c1"], 3)
    assert harms({**own, "c0": more}, ("c1", "c2", "c3", "c4", "c5", "c0")) == {"c0": "copy"}
    assert harms({**own, "c0": more}) == {"c1": "copy"}


def without_gram(own: State, rows: torch.Tensor, labels: torch.Tensor) -> State:
    squares = torch.nn.functional.one_hot(labels, CLASSES).double().T @ rows.square()
    return {**{key: value for key, value in own.items() if key != "gram"}, "squares": squares.float()}


def test_sums_of_squares_without_gram_matrices_are_judged_alike() -> None:
    made = {name: examples(k, (60,) * CLASSES) for k, name in enumerate(honest())}
    given = {name: without_gram(state(*own), *own) for name, own in made.items()}
    assert harms(given) == {}
    rows, labels = made["c0"]
    wrong = (labels + 1) % CLASSES
    assert harms({**given, "c0": without_gram(flipped(), rows, wrong)}) == {"c0": "label-flip"}


@pytest.mark.parametrize(("size", "classes"), [(16, 1), (12, 2), (12, CLASSES)])
def test_few_examples_alone_are_no_sign_and_hide_no_flip(size: int, classes: int) -> None:
    given = honest()
    for k in range(30):
        sizes = tuple(size if c in [(k + i) % CLASSES for i in range(classes)] else 0 for c in range(CLASSES))
        given[f"d{k:02d}"] = state(*examples(100 + k, sizes))
    assert harms(given) == {}
    rows, labels = examples(500, tuple(size if c < classes else 0 for c in range(CLASSES)))
    assert harms({**given, "d00": state(rows, (labels + 1) % CLASSES)}) == {"d00": "label-flip"}


def test_two_flipped_clients_of_six_are_both_found() -> None:
    rows, labels = examples(1, (60,) * CLASSES)
    assert harms({**honest(), "c0": flipped(), "c1": state(rows, (labels + 2) % CLASSES)}) == {
        "c0": "label-flip",
        "c1": "label-flip",
    }


def test_sums_with_noise_are_not_judged() -> None:
    noisy = {key: torch.ones(1, dtype=torch.float64) if key == "noise" else value for key, value in flipped().items()}
    assert harms({**honest(), "c0": noisy}) == {}


def test_three_times_as_many_sums_take_about_three_times_as_long() -> None:
    def operations(clients: int) -> int:
        given = {f"c{k}": state(*examples(k, (12,) * CLASSES)) for k in range(clients)}
        with Operations() as counted:
            assert harms(given) == {}
        return counted.count

    assert operations(90) < 4 * operations(30)


def test_the_distance_of_honest_sums_is_zero_on_average() -> None:
    def of(seed: int, size: int) -> Sums:
        rows, labels = examples(seed, (size,) * CLASSES)
        hot = torch.nn.functional.one_hot(labels, CLASSES).double()
        return Sums(hot.sum(0), hot.T @ rows, rows.square().sum(0))

    found = [distance(of(seed, 12), of(1000 + seed, 100)) for seed in range(40)]
    spread = torch.tensor(found).std().item() / math.sqrt(len(found))
    assert abs(sum(found) / len(found)) < 4 * spread
    assert spread < 0.01
