from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from method_fakes import OTHER, PROXY, UPLOADS, check_option, check_resume, options_to_try, run, tiny_job
from torch import nn

from strategies.combiners.combiners import Mean
from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError
from strategies.method import Silent
from strategies.methods.feddf import METHOD, FedDfConfig, fit
from strategies.teacher.augment import Standardize
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.student import fresh_student
from strategies.uploads.needs import check_needs

SMALL = FedDfConfig(epochs=3, batch_size=5, student_lr=0.1)
STILL = replace(SMALL, epochs=1, student_lr=1e-12, start="average")


@pytest.mark.parametrize("changes", [{}, {"start": "average", "augmentation": "crop-flip", "optimizer": "adam"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume(METHOD, replace(SMALL, **changes))


def test_student_comes_closer_to_the_ensemble_on_images_it_has_not_seen() -> None:
    images = torch.randint(0, 256, (96, 2, 8, 8), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    one = tiny_job(replace(SMALL, epochs=20, batch_size=16, student_lr=0.02))
    one = replace(one, proxy=images[:64])
    teacher = Ensemble.from_uploads(one.uploads, one.builders, Mean())
    inputs = Standardize(one.normalization)(images[64:] / 255)

    def distance(student: nn.Module) -> float:
        with torch.no_grad():
            return float((student.eval()(inputs).softmax(1) - teacher(inputs).softmax(1)).abs().mean())

    assert distance(load_model(fit(one, Silent()), one)) < 0.7 * distance(fresh_student(one))


def test_start_at_the_average_weighs_uploads_of_the_students_architecture_by_their_examples() -> None:
    student = run(METHOD, STILL).student
    first, last = UPLOADS[0].read(), UPLOADS[2].read()  # 10 and 30 examples; the one between is another architecture
    for name in ("0.weight", "5.weight", "7.bias"):
        torch.testing.assert_close(student[name], (first[name] + 3 * last[name]) / 4, msg=name)


@pytest.mark.parametrize(
    ("proxy", "found"),
    [
        (None, "holds none"),
        (PROXY[:, :1], r"shape \(11, 1, 8, 8\)"),
        (PROXY.float(), "float32"),
        (PROXY[:1], r"shape \(1, 2, 8, 8\)"),
    ],
)
def test_job_without_fitting_images_is_refused(proxy: torch.Tensor | None, found: str) -> None:
    check_needs(METHOD, tiny_job(SMALL))
    with pytest.raises(OptionError, match=f"'feddf' needs .*{found}.*Choose another method: .*dense"):
        check_needs(METHOD, replace(tiny_job(SMALL), proxy=proxy))


DF_OTHER: dict[str, Any] = OTHER | {"start": "average", "augmentation": "flip"}


@pytest.mark.parametrize("name", options_to_try(FedDfConfig))
def test_every_option_changes_the_result(name: str) -> None:
    check_option(METHOD, SMALL, name, DF_OTHER[name])


PUBLISHED: dict[str, dict[str, Any]] = {
    "published": {
        "start": "fresh", "epochs": 500, "kd_temperature": 4.0, "student_lr": 0.01, "optimizer": "sgd",
        "batch_size": 128, "steps_per_epoch": 0, "weight_decay": 1e-4, "student_clip": 10.0,
        "schedule": "cosine", "augmentation": "none",
    },
    "paper": {
        "start": "average", "kd_temperature": 1.0, "student_lr": 1e-3, "optimizer": "adam", "batch_size": 128,
        "epochs": 100, "steps_per_epoch": 100, "schedule": "cosine", "weight_decay": 0.0, "student_clip": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_values(name: str) -> None:
    values = asdict(FedDfConfig.preset(name))
    assert {key: values[key] for key in PUBLISHED[name]} == PUBLISHED[name]
