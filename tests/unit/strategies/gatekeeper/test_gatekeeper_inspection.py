from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from gatekeeper_fakes import (
    QUICK,
    State,
    backdoored,
    cohort,
    drawn,
    flipped,
    honest,
    job_of,
    times,
    upload,
    with_first,
)

from strategies.gatekeeper.inspection import inspect
from strategies.gatekeeper.verdicts import Inspection
from strategies.method import Silent, Upload

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
    one, other = (inspect(job_of(with_first(times(honest(0), f))), WITHOUT_TRIGGERS) for f in (1.0, 1.0))
    plain = inspect(job_of(cohort()), WITHOUT_TRIGGERS)

    assert [r.measures for r in one.rows] == [r.measures for r in other.rows] == [r.measures for r in plain.rows]


def test_weights_are_compared_among_equal_architectures_and_behaviour_among_all() -> None:
    others = [upload(f"d{k}", honest(k, architecture="normed"), architecture="normed") for k in range(3)]

    found = inspect(job_of([*with_first(flipped(0), 2), *others]), WITHOUT_TRIGGERS)

    assert found.suspects == ("c0",)
    assert math.isnan(found.rows[0].measures["norm"])
    assert not math.isnan(found.rows[2].measures["norm"])
    assert not math.isnan(found.rows[2].measures["statistics"])
    assert any("architecture net" in note for note in found.notes)


def test_the_verdict_survives_json_and_progress_is_reported() -> None:
    class Counter(Silent):
        steps: ClassVar[list[int]] = []

        def report(self, step: int, total: int, values: object = None, *_: object) -> None:  # noqa: ARG002
            self.steps.append(step)

    found = inspect(job_of(with_first(flipped(0))), WITHOUT_TRIGGERS, progress=Counter())

    again = Inspection.from_json(found.as_json())
    assert again.as_json() == found.as_json()
    assert again.table() == Inspection.from_json(again.as_json()).table()
    assert Counter.steps == sorted(Counter.steps)
    assert Counter.steps[-1] == 100
