from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from gatekeeper_fakes import QUICK, State, backdoored, cohort, drawn, flipped, honest, job_of, times, upload, with_first
from method_fakes import Book

from strategies.core.facts import UploadFacts
from strategies.gatekeeper.inspection import inspect
from strategies.gatekeeper.verdicts import Inspection
from strategies.method import Upload
from strategies.statistics.sums import Statistics, to_arrays

WITHOUT_TRIGGERS = replace(QUICK, trigger_steps=0)


def harms(uploads: list[Upload], **changes: object) -> dict[str, str]:
    found = inspect(job_of(uploads), replace(WITHOUT_TRIGGERS, **changes))  # type: ignore[arg-type]
    return {row.client: row.harm for row in found.rows if row.findings}


@pytest.mark.parametrize(
    ("state", "harm"),
    [(flipped(0), "label-flip"), (drawn(7), "random"), (times(honest(0), 10.0), "scaled")],
    ids=["label-flip", "random", "scaled"],
)
def test_a_harmful_upload_is_the_only_suspect_and_its_kind_is_reported(state: State, harm: str) -> None:
    assert harms(with_first(state)) == {"c0": harm}


def test_a_planted_trigger_is_found_and_named_with_its_class() -> None:
    uploads = [upload(f"c{k}", honest(k, architecture="linear"), architecture="linear") for k in range(4)]
    clean = inspect(job_of(uploads), QUICK)

    found = inspect(job_of([upload("c0", backdoored(0), architecture="linear"), *uploads[1:]]), QUICK)

    assert clean.suspects == ()
    assert found.suspects == ("c0",)
    assert found.rows[0].harm == "backdoor"
    assert "into class 0" in found.rows[0].reason


def test_an_honest_cohort_has_no_suspect_whatever_each_of_them_knows() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    uneven = [upload(f"c{k}", honest(k, pair), pair) for k, pair in enumerate(pairs)]

    assert harms(cohort()) == {}
    assert harms(uneven) == {}


def test_a_copy_is_the_later_one_where_the_arrival_is_known() -> None:
    uploads = with_first(honest(1))

    late = inspect(job_of(uploads), WITHOUT_TRIGGERS, arrived=("c1", "c2", "c3", "c0"))
    early = inspect(job_of(uploads), WITHOUT_TRIGGERS, arrived=("c0", "c1", "c2", "c3"))
    unknown = inspect(job_of(uploads), WITHOUT_TRIGGERS)

    assert late.rows[0].reason == "copy: equal to c1 in all weights, which arrived earlier"
    assert early.suspects == ("c1",)
    assert unknown.suspects == ("c1",)
    assert "is not known" in unknown.rows[1].reason


def test_scaling_by_one_changes_nothing_and_an_inspection_is_repeatable() -> None:
    one = inspect(job_of(with_first(times(honest(0), 1.0))), WITHOUT_TRIGGERS)
    plain = inspect(job_of(cohort()), WITHOUT_TRIGGERS)

    assert [r.measures for r in one.rows] == [r.measures for r in plain.rows]


def test_weights_are_compared_among_equal_architectures_and_behaviour_among_all() -> None:
    others = [upload(f"d{k}", honest(k, architecture="normed"), architecture="normed") for k in range(3)]

    found = inspect(job_of([*with_first(flipped(0), 2), *others]), WITHOUT_TRIGGERS)

    assert found.suspects == ("c0",)
    assert math.isnan(found.rows[0].measures["norm"])
    assert not math.isnan(found.rows[2].measures["norm"])
    assert not math.isnan(found.rows[2].measures["statistics"])
    assert any("architecture net" in note for note in found.notes)


def test_the_verdict_survives_json_and_progress_is_reported() -> None:
    book = Book()
    found = inspect(job_of(with_first(flipped(0))), WITHOUT_TRIGGERS, progress=book)

    again = Inspection.from_json(found.as_json())
    assert again.as_json() == found.as_json()
    assert again.table() == Inspection.from_json(again.as_json()).table()
    steps = [step for step, _ in book.reports]
    assert steps == sorted(steps)
    assert steps[-1] == 100


# The gatekeeper names flipped, random, copied and boasting uploads of feature sums, and no honest one.


CLASSES, FEATURES, CLIENTS = 5, 12, 6
SumsState = dict[str, torch.Tensor]


def examples(seed: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(sizes))
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    rows = centres[labels] + 0.8 * torch.randn(len(labels), FEATURES, generator=rng)
    return torch.nn.functional.normalize(rows).double(), labels


def state(rows: torch.Tensor, labels: torch.Tensor, noise: float = 0.0) -> SumsState:
    arrays = to_arrays(Statistics.of([(rows, labels)], CLASSES, FEATURES))
    return {**arrays, "noise": torch.tensor([noise], dtype=torch.float64)}


def honest_sums(skewed: bool = False) -> dict[str, SumsState]:
    """Return clients of which each has all classes, or two of them and a little of the rest."""
    found = {}
    for k in range(CLIENTS):
        sizes = tuple(60 if not skewed or c in (k % CLASSES, (k + 1) % CLASSES) else 4 for c in range(CLASSES))
        found[f"c{k}"] = state(*examples(k, sizes))
    return found


def harms_sums(states: Mapping[str, SumsState], arrived: tuple[str, ...] = ()) -> dict[str, str]:
    uploads = [
        Upload(UploadFacts(name, "statistics", int(own["counts"].sum().clamp_min(1)), None), lambda own=own: own)  # type: ignore[misc]
        for name, own in states.items()
    ]
    found = inspect(job_of(uploads), QUICK, arrived=arrived)
    return {row.client: row.harm for row in found.rows if row.findings}


@pytest.mark.parametrize("skewed", [False, True])
def test_no_honest_client_is_suspect(skewed: bool) -> None:
    assert harms_sums(honest_sums(skewed)) == {}


def flipped_sums() -> SumsState:
    rows, labels = examples(0, (60,) * CLASSES)
    return state(rows, (labels + 1) % CLASSES)


def backwards() -> SumsState:
    rows, labels = examples(0, (60,) * CLASSES)
    return state(rows.flip(1), labels)


def claimed(own: SumsState, factor: int) -> SumsState:
    return {key: value * factor if key != "noise" else value for key, value in own.items()}


@pytest.mark.parametrize(
    ("harmful", "harm"),
    [
        (flipped_sums(), "label-flip"),
        (backwards(), "random"),
        (claimed(honest_sums()["c0"], 100), "scaled"),
        (claimed(flipped_sums(), 10), "label-flip"),  # outweighs all the others together
    ],
)
def test_a_harmful_client_is_the_only_suspect(harmful: SumsState, harm: str) -> None:
    assert harms_sums({**honest_sums(), "c0": harmful}) == {"c0": harm}


def test_a_copy_that_claims_more_is_named_and_the_earlier_client_is_the_original() -> None:
    own = honest_sums()
    more = claimed(own["c1"], 3)
    assert harms_sums({**own, "c0": more}, ("c1", "c2", "c3", "c4", "c5", "c0")) == {"c0": "copy"}
    assert harms_sums({**own, "c0": more}) == {"c1": "copy"}


def test_sums_with_noise_are_not_judged() -> None:
    noisy = {
        key: torch.ones(1, dtype=torch.float64) if key == "noise" else value for key, value in flipped_sums().items()
    }
    assert harms_sums({**honest_sums(), "c0": noisy}) == {}
