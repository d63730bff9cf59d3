"""Tally where a client does not agree with the others, or says to have too many examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import BUILDERS, Book, drawn_upload, telling, tiny_job
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.combiners.outcomes import build_ensemble
from strategies.combiners.tally_pool import TallyPoolOptions, build_tally_teacher, fit_pool
from strategies.core.errors import UploadError
from strategies.core.facts import UploadFacts
from strategies.method import METHODS, Job, Outcome, Upload
from strategies.methods.tally import METHOD, TallyConfig
from strategies.teacher.ensemble import Ensemble

CLIENTS, STRANGER = 5, 1
SMALL: dict[str, Any] = {"epochs": 1, "images": 8, "batch_size": 4, "probes": 200}


def state(seed: int) -> dict[str, Tensor]:
    return drawn_upload(seed, "wide", BUILDERS).read()


def upload(k: int, **facts: Any) -> Upload:
    """Client k: nearly what the others learned, but for the stranger, who learned something else."""
    rng = torch.Generator().manual_seed(k)
    common = state(99 if k == STRANGER else 7)
    weights = {name: value + 0.003 * torch.randn(value.shape, generator=rng) for name, value in common.items()}
    counts = (4 + k, 6, 6)
    told = {"num_examples": sum(counts), "label_counts": counts}
    return Upload(UploadFacts(f"c{k}", "wide", **{**told, **facts}), lambda: weights)


UPLOADS = tuple(upload(k) for k in range(CLIENTS))


def job(uploads: tuple[Upload, ...] = UPLOADS, **options: Any) -> Job:
    return replace(tiny_job(TallyConfig(**{**SMALL, **options}), uploads=uploads), student="wide")


def fitted(uploads: tuple[Upload, ...] = UPLOADS, **options: Any) -> tuple[Outcome, list[str]]:
    book = Book()
    outcome = METHOD.fit(job(uploads, **options), book)
    return outcome, book.notes


def same(left: Outcome, right: Outcome) -> bool:
    return all(torch.equal(left.student[key], right.student[key]) for key in left.student)


def test_a_client_when_it_does_not_agree_has_no_weight_and_the_user_is_warned() -> None:
    honest, _ = fitted(tuple(one for k, one in enumerate(UPLOADS) if k != STRANGER))
    without, nothing = fitted()
    outcome, notes = fitted(agreement=0.3)

    assert nothing == []
    why = "they do not agree with the others on noise, or their logits on it are not finite, or too large"
    assert notes == [f"left out are c1: {why}"]
    assert len(outcome.ensemble.clients) == CLIENTS  # it stays a member, without a say
    assert outcome.ensemble.weights["weights"].tolist() == [float(k != STRANGER) for k in range(CLIENTS)]
    assert same(outcome, honest)  # neither the teacher nor the start has anything of it
    assert not same(outcome, without)


@pytest.mark.parametrize("counts", ["auto", "noise-rows"])
def test_a_boaster_when_examples_are_capped_moves_neither_teacher_nor_start(counts: str) -> None:
    level = tuple(telling(one, num_examples=18, label_counts=(6, 6, 6)) for one in UPLOADS)
    boast = (*level[:-1], telling(level[-1], num_examples=1800, label_counts=(600, 600, 600)))

    honest, _ = fitted(level, counts=counts)

    assert same(fitted(boast, counts=counts, cap_examples=True)[0], honest)
    assert not same(fitted(boast, counts=counts)[0], honest)


@pytest.mark.parametrize("bias", [1e16, 2e38])
def test_a_client_with_finite_weights_and_logits_beyond_arithmetic_is_left_out_and_ruins_nothing(bias: float) -> None:
    huge = {**UPLOADS[STRANGER].read(), "3.bias": torch.full((3,), bias)}
    uploads = tuple(replace(one, read=lambda: huge) if k == STRANGER else one for k, one in enumerate(UPLOADS))
    honest, _ = fitted(tuple(one for k, one in enumerate(UPLOADS) if k != STRANGER))

    outcome, notes = fitted(uploads)

    assert [note[:15] for note in notes] == ["left out are c1"]
    assert same(outcome, honest)


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 5), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


def without_numbers() -> tuple[Upload, ...]:
    """The stranger answers, but gradients through its normalisation of huge numbers are not: they are 0 / 0."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = grouped().state_dict()
    wild = {**state, "0.weight": 1e30 * state["0.weight"], "4.bias": torch.full((3,), 1e16)}
    bad = replace(telling(UPLOADS[STRANGER], architecture="grouped"), read=lambda: wild)
    return tuple(bad if k == STRANGER else one for k, one in enumerate(UPLOADS))


# Wherever its pool teaches, what it leaves out ruins nothing, and does not come back.


IMAGES = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
FEW: dict[str, Any] = {"epochs": 2, "generator_steps": 2, "batch_size": 4, "synthesis_batch_size": 6, "latent": 8}


def asked(name: str, uploads: tuple[Upload, ...], options: dict[str, Any], **also: Any) -> tuple[Outcome, Book]:
    book, config = Book(), METHODS[name].config(**options)
    named = replace(job(uploads), config=config, builders={**job().builders, "grouped": grouped}, **also)
    return METHODS[name].fit(named, book), book


def finite(rows: list[dict[str, Any]]) -> bool:
    numbers = [value for row in rows for value in row.values() if not isinstance(value, str)]
    return all(bool(torch.tensor(value).isfinite().all()) for value in numbers)


def test_co_boosting_never_gives_it_a_weight_again() -> None:
    options = {**FEW, "reweighting_data": "all", "reweighting_step": 0.3}
    outcome, book = asked("co-boosting", without_numbers(), options, teacher="tally")

    weights = outcome.ensemble.weights["weights"]
    assert [bool(weight) for weight in weights] == [k != STRANGER for k in range(CLIENTS)]
    assert not torch.equal(weights, (weights > 0).float())  # they were learned
    answers = build_ensemble(
        replace(job(without_numbers()), builders={**job().builders, "grouped": grouped}), outcome.ensemble
    )
    assert bool(answers(IMAGES).isfinite().all())
    assert finite(book.rows)


def test_a_run_of_tally_that_left_it_out_can_teach_a_generator() -> None:
    first, _ = asked("tally", without_numbers(), SMALL)
    assert float(first.ensemble.weights["weights"][STRANGER]) == 0

    outcome, book = asked("dense", without_numbers(), FEW, teacher=first.ensemble)

    assert [row["epoch"] for row in book.rows if "epoch" in row] == [1, 2]
    assert finite(book.rows)
    assert outcome.student is not None


@pytest.mark.parametrize("large", [(0,), (0, 1), (0, 1, 2)])
def test_a_member_that_cannot_be_probed_does_not_judge_the_others(large: tuple[int, ...]) -> None:
    """Their logits are finite, and alike."""
    shared: dict[str, Tensor] = {**state(99), "3.weight": 1e17 * state(99)["3.weight"]}
    honest = telling(UPLOADS[0], client="c1")
    uploads = tuple(
        replace(one, read=lambda: shared) if k in large else honest if k == STRANGER else one
        for k, one in enumerate(UPLOADS)
    )
    pool = build_tally_teacher(job(uploads), TallyPoolOptions(agreement=0.3, probes=200))[1]

    assert [k for k, weight in enumerate(pool.weights) if weight] == [k for k in range(CLIENTS) if k not in large]


def test_clients_none_of_whom_has_an_example_are_refused() -> None:
    uploads = tuple(telling(one, num_examples=0, label_counts=(0, 0, 0)) for one in UPLOADS)
    given: Job = job(uploads)
    with pytest.raises(UploadError, match="no client whose model answers noise with finite logits has examples"):
        fit_pool(given, Ensemble.of_job(given, uploads, Mean()), TallyPoolOptions())
