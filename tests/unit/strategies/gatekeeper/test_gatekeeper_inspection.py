from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
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
from method_fakes import telling

from strategies.gatekeeper.evidence import gather
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


def test_models_that_flatten_by_view_are_judged_as_any() -> None:
    assert harms([telling(one, architecture="viewing") for one in with_first(flipped(0))]) == {"c0": "label-flip"}


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


def test_a_copy_with_a_little_noise_is_one_and_beside_a_far_off_client_no_other_is() -> None:
    near = {key: value + 1e-4 * torch.sign(value) for key, value in honest(1).items()}

    assert harms(with_first(near)) == {"c1": "copy"}
    assert harms(with_first(times(honest(0), 100.0))) == {"c0": "scaled"}


def test_a_copy_that_does_not_fit_its_label_counts_is_distinguished_from_the_original() -> None:
    own = [upload(f"c{k}", honest(k, (0, 1)), (0, 1)) for k in range(1, 4)]
    rest = [upload(f"d{k}", honest(k, (2, 3)), (2, 3)) for k in range(3)]
    thief = upload("a0", honest(1, (0, 1)), (2, 3))

    assert harms([thief, *own, *rest]) == {"a0": "copy"}


def test_rows_follow_their_clients_when_the_clients_change_places() -> None:
    uploads = with_first(flipped(0))

    one = inspect(job_of(uploads), WITHOUT_TRIGGERS)
    other = inspect(job_of(uploads[::-1]), WITHOUT_TRIGGERS)

    assert {r.client: r.harm for r in one.rows} == {r.client: r.harm for r in other.rows}
    for row in one.rows:
        (same,) = [r for r in other.rows if r.client == row.client]
        for name in ("likeness", "norm", "agreement"):
            assert row.measures[name] == pytest.approx(same.measures[name], abs=1e-5)


def test_scaling_by_one_changes_nothing_and_an_inspection_is_repeatable() -> None:
    one, other = (inspect(job_of(with_first(times(honest(0), f))), WITHOUT_TRIGGERS) for f in (1.0, 1.0))
    plain = inspect(job_of(cohort()), WITHOUT_TRIGGERS)

    assert [r.measures for r in one.rows] == [r.measures for r in other.rows] == [r.measures for r in plain.rows]


def test_without_label_counts_a_flipped_client_is_found_still_and_it_is_logged() -> None:
    silent = [telling(u, label_counts=None) for u in with_first(flipped(0))]

    found = inspect(job_of(silent), WITHOUT_TRIGGERS)

    assert found.suspects == ("c0",)
    assert found.notes == ("no label counts from c0, c1, c2, c3: the classes that they predict count as known",)


def test_a_client_without_label_counts_knows_the_classes_that_it_predicts() -> None:
    half = telling(upload("c0", honest(0, (0, 1))), label_counts=None)

    known = gather(job_of([half, upload("c1", honest(1))]), replace(WITHOUT_TRIGGERS, steps=5), Silent()).known

    assert known.tolist() == [[True, True, False, False], [True] * 4]


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_clients_are_not_judged(count: int) -> None:
    found = inspect(job_of([upload("c0", times(honest(0), 1e3)), *cohort()[1:count]]), QUICK)

    assert found.suspects == ()
    assert len(found.notes) == 1
    assert "cannot be judged" in found.notes[0]


def test_weights_are_compared_among_equal_architectures_and_behaviour_among_all() -> None:
    others = [upload(f"d{k}", honest(k, architecture="normed"), architecture="normed") for k in range(3)]

    found = inspect(job_of([*with_first(flipped(0), 2), *others]), WITHOUT_TRIGGERS)

    assert found.suspects == ("c0",)
    assert math.isnan(found.rows[0].measures["norm"])
    assert not math.isnan(found.rows[2].measures["norm"])
    assert not math.isnan(found.rows[2].measures["statistics"])
    assert any("architecture net" in note for note in found.notes)


def test_running_variances_of_another_size_are_found() -> None:
    states = [honest(k, architecture="normed") for k in range(4)]
    states[0] = {k: v * 100 if k.endswith("running_var") else v for k, v in states[0].items()}

    found = inspect(job_of([upload(f"c{k}", s, architecture="normed") for k, s in enumerate(states)]), WITHOUT_TRIGGERS)

    assert found.suspects == ("c0",)
    assert "running variances" in found.rows[0].reason


def test_rows_of_features_are_judged_by_their_weights_alone() -> None:
    flat = [telling(u, architecture="linear") for u in cohort()]
    states = [honest(k, architecture="linear") for k in range(4)]
    states[0] = times(states[0], 10.0)
    uploads = [replace(u, read=lambda s=s: dict(s)) for u, s in zip(flat, states, strict=True)]  # type: ignore[misc]

    found = inspect(job_of(uploads, input_shape=(64, 1, 1)), QUICK)

    assert {r.client: r.harm for r in found.rows if r.findings} == {"c0": "scaled"}
    assert "agreement" not in found.rows[0].measures
    assert any("no images can be made" in note for note in found.notes)


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
