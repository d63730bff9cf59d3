"""The gatekeeper names flipped, random, copied and boasting uploads of feature sums, and no honest one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from gatekeeper_fakes import QUICK, job_of

from strategies.core.facts import UploadFacts
from strategies.gatekeeper.inspection import inspect
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


def test_sums_with_noise_are_not_judged() -> None:
    noisy = {key: torch.ones(1, dtype=torch.float64) if key == "noise" else value for key, value in flipped().items()}
    assert harms({**honest(), "c0": noisy}) == {}
