"""Tally where a client does not agree with the others, or says to have too many examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import Book, telling, tiny_job, wide
from torch import nn

from strategies.core.facts import UploadFacts
from strategies.method import Job, Outcome, Upload
from strategies.methods.tally import METHOD, TallyConfig

CLIENTS, STRANGER = 5, 1


def state(seed: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {name: value.clone() for name, value in wide().state_dict().items()}


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
    small: dict[str, Any] = {"epochs": 1, "images": 8, "batch_size": 4, "probes": 200}
    return replace(tiny_job(TallyConfig(**{**small, **options}), uploads=uploads), student="wide")


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
