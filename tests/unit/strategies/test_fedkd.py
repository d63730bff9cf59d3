from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from method_fakes import (
    OTHER,
    UPLOADS,
    Array,
    Book,
    check_option,
    check_resume,
    logits_of,
    options_to_try,
    softmax,
    tiny_job,
)

from strategies.method import Job
from strategies.methods.fedkd import METHOD, FedKdConfig, fit

SMALL = FedKdConfig(epochs=3, batch_size=5, student_lr=0.01)
# One step on all images; the student, which has no dropout, hardly moves.
STILL = replace(SMALL, epochs=1, batch_size=11, student_lr=1e-12)


def still_job(**changes: Any) -> Job:
    return replace(tiny_job(replace(STILL, **changes)), student="wide")


def recorded(job: Job) -> float:
    book = Book()
    fit(job, book)
    return float(book.rows[0]["distillation"])


def weighted(members: Array) -> Array:
    counts = np.array([upload.label_counts for upload in UPLOADS], dtype=float)
    share = counts / counts.sum(0)
    combined: Array = np.einsum("mc,mbc->bc", share, members)
    return combined


def test_loss_is_the_mean_distance_from_the_label_count_ensembles_logits() -> None:
    job = still_job()
    student, members = logits_of(job)
    assert recorded(job) == pytest.approx(np.abs(student - weighted(members)).mean(), rel=1e-4)


def test_loss_kl_is_the_distillation_loss_at_its_temperature() -> None:
    job = still_job(loss="kl", kd_temperature=3.0)
    student, members = logits_of(job)
    p, q = softmax(weighted(members) / 3), softmax(student / 3)
    assert recorded(job) == pytest.approx(9 * (p * np.log(p / q)).sum(1).mean(), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"augmentation": "crop-flip", "loss": "kl"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume(METHOD, replace(SMALL, **changes))


KD_OTHER: dict[str, Any] = OTHER | {"augmentation": "flip", "loss": "kl"}


@pytest.mark.parametrize("name", options_to_try(FedKdConfig))
def test_every_option_changes_the_result(name: str) -> None:
    config = replace(SMALL, loss="kl") if name == "kd_temperature" else SMALL  # L1 has none
    check_option(METHOD, config, name, KD_OTHER[name])
