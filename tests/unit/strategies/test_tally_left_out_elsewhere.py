"""A client that Tally's pool leaves out, wherever that pool teaches: it ruins nothing, and does not come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import Book, telling
from test_tally_left_out import CLIENTS, STRANGER, UPLOADS, grouped, job, state, without_numbers
from torch import Tensor

from strategies.combiners.combiners import Mean
from strategies.combiners.outcomes import build_ensemble
from strategies.combiners.tally_pool import TallyPoolOptions, build_tally_teacher, fit_pool
from strategies.core.errors import UploadError
from strategies.method import METHODS, Job, Method, Outcome, Upload
from strategies.methods.co_boosting import CoBoostingConfig
from strategies.methods.dense import DenseConfig
from strategies.methods.tally import METHOD
from strategies.teacher.ensemble import Ensemble

IMAGES = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
FEW: dict[str, Any] = {"epochs": 2, "generator_steps": 2, "batch_size": 4, "synthesis_batch_size": 6, "latent": 8}


def asked(method: Method, config: Any, uploads: tuple[Upload, ...], **also: Any) -> tuple[Outcome, Book]:
    book = Book()
    named = replace(job(uploads), config=config, builders={**job().builders, "grouped": grouped}, **also)
    return method.fit(named, book), book


def finite(rows: list[dict[str, Any]]) -> bool:
    numbers = [value for row in rows for value in row.values() if not isinstance(value, str)]
    return all(bool(torch.tensor(value).isfinite().all()) for value in numbers)


def test_co_boosting_never_gives_it_a_weight_again() -> None:
    config = CoBoostingConfig(**FEW, reweighting_data="all", reweighting_step=0.3)
    outcome, book = asked(METHODS["co-boosting"], config, without_numbers(), teacher="tally")

    weights = outcome.ensemble.weights["weights"]
    assert [bool(weight) for weight in weights] == [k != STRANGER for k in range(CLIENTS)]
    assert not torch.equal(weights, (weights > 0).float())  # they were learned
    answers = build_ensemble(
        replace(job(without_numbers()), builders={**job().builders, "grouped": grouped}), outcome.ensemble
    )
    assert bool(answers(IMAGES).isfinite().all())
    assert finite(book.rows)


def test_a_run_of_tally_that_left_it_out_can_teach_a_generator() -> None:
    first, _ = asked(METHOD, job().config, without_numbers())
    assert float(first.ensemble.weights["weights"][STRANGER]) == 0

    outcome, book = asked(METHODS["dense"], DenseConfig(**FEW), without_numbers(), teacher=first.ensemble)

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
