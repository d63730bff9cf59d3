from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import (
    BUILDERS,
    OTHER,
    PROXY,
    UPLOADS,
    Book,
    check_option,
    check_resume_at_every_border,
    check_teacher_stays,
    run,
    same,
    telling,
    tiny_job,
)

from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError
from strategies.fedkd import METHOD, FedKdConfig, fit
from strategies.method import EnsembleSpec, Job, Outcome, Silent
from strategies.teacher.augment import Standardize
from strategies.teacher.student import fresh_student
from strategies.uploads.needs import check_needs

SMALL = FedKdConfig(epochs=3, batch_size=5, student_lr=0.01)
# One step on all images; the student, which has no dropout, hardly moves.
STILL = replace(SMALL, epochs=1, batch_size=11, student_lr=1e-12)
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return run(METHOD, SMALL)


def still_job(**changes: Any) -> Job:
    return replace(tiny_job(replace(STILL, **changes)), student="wide")


def logits_of(job: Job) -> tuple[Array, Array]:
    """Return the fresh student's logits [B, C] and the clients' [M, B, C] on the images as they are."""
    inputs = Standardize(job.normalization)(PROXY / 255)
    found = []
    for upload in job.uploads:
        model = BUILDERS[upload.architecture]().eval()
        model.load_state_dict(upload.read())
        found.append(model(inputs).detach().double().numpy())
    return fresh_student(job)(inputs).detach().double().numpy(), np.stack(found)


def recorded(job: Job) -> float:
    book = Book()
    fit(job, book)
    return float(book.rows[0]["distillation"])


def weighted(members: Array) -> Array:
    counts = np.array([upload.label_counts for upload in UPLOADS], dtype=float)
    share = counts / counts.sum(0)
    combined: Array = np.einsum("mc,mbc->bc", share, members)
    return combined


def softmax(logits: Array) -> Array:
    powers: Array = np.exp(logits - logits.max(1, keepdims=True))
    powers /= powers.sum(1, keepdims=True)
    return powers


def test_loss_is_the_mean_distance_from_the_label_count_ensembles_logits() -> None:
    job = still_job()
    student, members = logits_of(job)
    assert recorded(job) == pytest.approx(np.abs(student - weighted(members)).mean(), rel=1e-4)


def test_loss_kl_is_the_distillation_loss_at_its_temperature() -> None:
    job = still_job(loss="kl", kd_temperature=3.0)
    student, members = logits_of(job)
    p, q = softmax(weighted(members) / 3), softmax(student / 3)
    assert recorded(job) == pytest.approx(9 * (p * np.log(p / q)).sum(1).mean(), rel=1e-4)


def test_class_that_no_client_holds_is_pulled_to_zero() -> None:
    job = still_job()
    job = replace(
        job,
        uploads=tuple(telling(one, label_counts=(3, 0, one.num_examples or 0)) for one in UPLOADS),
    )
    student, members = logits_of(job)
    target = np.einsum("mc,mbc->bc", [[1 / 3, 0, k / 6] for k in (1, 2, 3)], members)
    assert recorded(job) == pytest.approx(np.abs(student - target).mean(), rel=1e-4)


def test_teacher_of_the_job_takes_the_place_of_the_label_counts() -> None:
    spec = EnsembleSpec(("c2", "c0"), "weighted", {"weights": torch.tensor([3.0, 1.0])})
    silent = tuple(telling(one, label_counts=None) for one in UPLOADS)
    job = replace(still_job(), teacher=spec, uploads=silent)
    check_needs(METHOD, job)
    student, members = logits_of(job)
    assert recorded(job) == pytest.approx(np.abs(student - (3 * members[2] + members[0]) / 4).mean(), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"augmentation": "crop-flip", "loss": "kl"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume_at_every_border(METHOD, replace(SMALL, **changes))


def test_fit_with_another_seed_gives_another_result(usual: Outcome) -> None:
    assert same(run(METHOD, SMALL), usual)
    assert not same(run(METHOD, SMALL, seed=1), usual)


@pytest.mark.parametrize("loss", ["l1", "kl"])
def test_student_comes_closer_to_the_ensemble(loss: str) -> None:
    job = replace(tiny_job(replace(SMALL, loss=loss, epochs=60)), student="wide")
    inputs = Standardize(job.normalization)(PROXY / 255)
    target = torch.from_numpy(weighted(logits_of(job)[1]))

    def distance(student: torch.nn.Module) -> float:
        with torch.no_grad():
            return float((student(inputs).softmax(1) - target.softmax(1)).abs().mean())

    assert distance(load_model(fit(job, Silent()), job)) < 0.3 * distance(fresh_student(job))


def test_every_epoch_passes_over_all_images_and_records_its_loss() -> None:
    book = Book()
    outcome = fit(tiny_job(SMALL), book)
    assert [row["epoch"] for row in book.rows] == [1, 2, 3]
    assert book.reports == 3 + 3 * 2 + 3  # 11 images: of 5, 5 and 1 for the teacher, of 5 and 6 for the student
    assert outcome.images is None
    assert outcome.timings.keys() >= {"teacher", "distillation"}


def test_job_without_images_or_label_counts_is_refused() -> None:
    check_needs(METHOD, tiny_job(SMALL))
    with pytest.raises(OptionError, match="'fedkd' needs that the server holds images without labels"):
        check_needs(METHOD, replace(tiny_job(SMALL), proxy=None))
    silent = (telling(UPLOADS[0], label_counts=None), *UPLOADS[1:])
    with pytest.raises(OptionError, match=r"'fedkd' needs label counts, .*: c0\. Choose another method: .*feddf"):
        check_needs(METHOD, tiny_job(SMALL, uploads=silent))


def test_a_run_leaves_the_teachers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    check_teacher_stays(METHOD, SMALL, monkeypatch)


KD_OTHER: dict[str, Any] = OTHER | {"augmentation": "flip", "loss": "kl"}


@pytest.mark.parametrize("name", [field.name for field in fields(FedKdConfig)])
def test_every_option_changes_the_result(name: str) -> None:
    config = replace(SMALL, loss="kl") if name == "kd_temperature" else SMALL  # L1 has none
    check_option(METHOD, config, name, KD_OTHER[name])


def test_defaults_are_the_published_ones() -> None:
    assert asdict(FedKdConfig()).items() >= {
        "epochs": 200, "batch_size": 512, "student_lr": 1e-3,
        "loss": "l1", "kd_temperature": 3.0,
    }.items()  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [("loss", "l2"), ("augmentation", "blur"), ("batch_size", 1)])
def test_config_out_of_range_names_its_key(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"fedkd.{field.replace('_', '-')}"):
        FedKdConfig(**{field: value})  # type: ignore[arg-type]
