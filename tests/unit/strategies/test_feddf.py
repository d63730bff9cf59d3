from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import OTHER, PROXY, UPLOADS, check_option, check_resume, options_to_try, run, tiny_job

from strategies.core.errors import OptionError
from strategies.methods.feddf import METHOD, FedDfConfig
from strategies.uploads.needs import check_needs

SMALL = FedDfConfig(epochs=3, batch_size=5, student_lr=0.1)
STILL = replace(SMALL, epochs=1, student_lr=1e-12, start="average")


@pytest.mark.parametrize("changes", [{}, {"start": "average", "augmentation": "crop-flip", "optimizer": "adam"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume(METHOD, replace(SMALL, **changes))


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
